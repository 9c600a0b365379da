# /// script
# dependencies = ["autogen-agentchat", "autogen-ext[openai]"]
# ///
"""AutoGen's assistant."""

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import ModelClientStreamingChunkEvent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from checks import (
    HELLO,
    KEY,
    MANUAL,
    MODEL,
    QUESTION,
    TOO_LONG,
    V1,
    Checks,
    Paint,
    get_weather,
    run,
)

ABILITIES = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "family": "unknown",
    "structured_output": True,
}


class Chats(Checks):
    client = "autogen-agentchat"
    api = "chat"
    model = OpenAIChatCompletionClient(
        model=MODEL,
        base_url=V1,
        api_key=KEY,
        model_info=ABILITIES,
        max_tokens=60,
        temperature=0,
        max_retries=0,
    )

    def agent(self, **fields):
        fields = {"system_message": None} | fields
        return AssistantAgent("teller", self.model, **fields)

    async def first_chat(self):
        return (await self.agent().run(task=HELLO)).messages[-1].content

    async def stream(self):
        stream = self.agent(model_client_stream=True).run_stream(task=HELLO)
        return [
            event.content
            async for event in stream
            if isinstance(event, ModelClientStreamingChunkEvent)
        ]

    async def tool_round_trip(self):
        agent = self.agent(tools=[get_weather], reflect_on_tool_use=True)
        return (await agent.run(task=QUESTION)).messages[-1].content

    async def second_turn(self):
        agent = self.agent(system_message=MANUAL)
        await agent.run(task=HELLO)
        yield
        await agent.run(task="And then?")

    async def structured_output(self):
        answer = await self.agent(output_content_type=Paint).run(task=HELLO)
        return answer.messages[-1].content

    async def overflow(self):
        await self.agent().run(task=TOO_LONG)


run(Chats)

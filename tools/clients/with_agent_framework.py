# /// script
# dependencies = ["agent-framework-openai"]
# ///
"""Microsoft's Agent Framework, over responses (its default) and chats."""

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
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
from openai import AsyncOpenAI

CLIENT = AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0)
BRIEF = {"max_tokens": 60, "temperature": 0}


class Responses(Checks):
    client = "agent-framework-openai"
    api = "responses"
    model = OpenAIChatClient(MODEL, async_client=CLIENT)

    def agent(self, **fields):
        return Agent(self.model, default_options=BRIEF, **fields)

    async def first_chat(self):
        return (await self.agent().run(HELLO)).text

    async def stream(self):
        return [part.text async for part in self.agent().run(HELLO, stream=True)]

    async def tool_round_trip(self):
        return (await self.agent(tools=[get_weather]).run(QUESTION)).text

    async def second_turn(self):
        agent = self.agent(instructions=MANUAL)
        session = agent.create_session()
        await agent.run(HELLO, session=session)
        yield
        await agent.run("And then?", session=session)

    async def structured_output(self):
        answer = await self.agent().run(HELLO, options={"response_format": Paint})
        return answer.value

    async def overflow(self):
        await self.agent().run(TOO_LONG)


class Chats(Responses):
    api = "chat"
    model = OpenAIChatCompletionClient(MODEL, async_client=CLIENT)


run(Responses, Chats)

# /// script
# dependencies = ["openai-agents"]
# ///
"""OpenAI's Agents SDK, over chats and responses."""

from dataclasses import replace

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    WebSearchTool,
    function_tool,
    set_tracing_disabled,
)
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
from openai.types.responses import ResponseTextDeltaEvent

set_tracing_disabled(True)
CLIENT = AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0)
# The SDK takes answers that reach max_tokens for failures, so that they end with a sentence.
SENTENCE = {"temperature": 0, "extra_body": {"stop": [". "]}}


class Chats(Checks):
    client = "openai-agents"
    api = "chat"
    model = OpenAIChatCompletionsModel(MODEL, CLIENT)
    settings = ModelSettings(**SENTENCE)
    tools = (function_tool(get_weather),)

    def agent(self, **fields):
        fields = {"model_settings": self.settings, "model": self.model} | fields
        return Agent(name="teller", **fields)

    async def first_chat(self):
        return (await Runner.run(self.agent(instructions="brief"), HELLO)).final_output

    async def stream(self):
        stream = Runner.run_streamed(self.agent(), HELLO)
        return [
            event.data.delta
            async for event in stream.stream_events()
            if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent)
        ]

    async def tool_round_trip(self):
        # The agent that the first one hands over to calls the tool, and then answers.
        required = replace(self.settings, tool_choice="required")
        weatherman = self.agent(tools=[*self.tools], model_settings=required)
        desk = Agent(name="desk", model=self.model, model_settings=required, handoffs=[weatherman])
        answer = await Runner.run(desk, QUESTION)
        assert answer.last_agent.name == weatherman.name
        return answer.final_output

    async def second_turn(self):
        agent = self.agent(instructions=MANUAL)
        first = await Runner.run(agent, HELLO)
        yield
        await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "And then?"}])

    async def structured_output(self):
        return (await Runner.run(self.agent(output_type=Paint), HELLO)).final_output

    async def overflow(self):
        await Runner.run(self.agent(), TOO_LONG)


class Responses(Chats):
    api = "responses"
    model = OpenAIResponsesModel(MODEL, CLIENT)
    settings = ModelSettings(truncation="auto", **SENTENCE)
    tools = (function_tool(get_weather), WebSearchTool())


run(Chats, Responses)

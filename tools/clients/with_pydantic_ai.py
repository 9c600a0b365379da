# /// script
# dependencies = ["pydantic-ai-slim[anthropic,openai]"]
# ///
"""Pydantic AI, over chats, responses and messages."""

from anthropic import AsyncAnthropic
from checks import (
    BASE_URL,
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
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

OPENAI = OpenAIProvider(openai_client=AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0))
ANTHROPIC = AnthropicProvider(
    anthropic_client=AsyncAnthropic(base_url=BASE_URL, api_key=KEY, max_retries=0)
)
BRIEF = {"max_tokens": 60, "temperature": 0}


class Chats(Checks):
    client = "pydantic-ai-slim"
    api = "chat"
    model = OpenAIChatModel(MODEL, provider=OPENAI)
    kinds = (NativeOutput(Paint), ToolOutput(Paint))

    async def first_chat(self):
        return (await Agent(self.model, model_settings=BRIEF).run(HELLO)).output

    async def stream(self):
        async with Agent(self.model, model_settings=BRIEF).run_stream(HELLO) as stream:
            return [text async for text in stream.stream_text(delta=True, debounce_by=None)]

    async def tool_round_trip(self):
        agent = Agent(self.model, tools=[get_weather], model_settings=BRIEF)
        return (await agent.run(QUESTION)).output

    async def second_turn(self):
        agent = Agent(self.model, instructions=MANUAL, model_settings=BRIEF)
        first = await agent.run(HELLO)
        yield
        await agent.run("And then?", message_history=first.all_messages())

    async def structured_output(self):
        answers = []
        for kind in self.kinds:
            agent = Agent(self.model, output_type=kind, model_settings=BRIEF)
            answers.append((await agent.run(HELLO)).output)
        assert all(isinstance(answer, Paint) for answer in answers)
        return answers[0]

    async def overflow(self):
        await Agent(self.model).run(TOO_LONG)


class Responses(Chats):
    api = "responses"
    model = OpenAIResponsesModel(MODEL, provider=OPENAI)


class Messages(Chats):
    api = "messages"
    model = AnthropicModel(MODEL, provider=ANTHROPIC)
    kinds = (ToolOutput(Paint),)  # it has native output for Claude only


run(Chats, Responses, Messages)

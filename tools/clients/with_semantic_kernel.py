# /// script
# dependencies = ["semantic-kernel"]
# ///
"""Semantic Kernel's chat completion."""

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
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function


class Weather:
    @kernel_function(name="get_weather", description="Returns the weather in a city.")
    def get_weather(self, city: str) -> str:
        return get_weather(city)


def settings(**fields):
    return OpenAIChatPromptExecutionSettings(**({"max_tokens": 60, "temperature": 0} | fields))


class Chats(Checks):
    client = "semantic-kernel"
    api = "chat"
    model = OpenAIChatCompletion(
        ai_model_id=MODEL, async_client=AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0)
    )

    async def ask(self, history, **fields):
        return await self.model.get_chat_message_content(history, settings(**fields))

    def history(self, text, system=None):
        history = ChatHistory(system_message=system)
        history.add_user_message(text)
        return history

    async def first_chat(self):
        return str(await self.ask(self.history(HELLO)))

    async def stream(self):
        stream = self.model.get_streaming_chat_message_content(self.history(HELLO), settings())
        return [str(part) async for part in stream]

    async def tool_round_trip(self):
        kernel = Kernel()
        kernel.add_plugin(Weather(), "town")
        answer = await self.model.get_chat_message_content(
            self.history(QUESTION),
            settings(function_choice_behavior=FunctionChoiceBehavior.Required()),
            kernel=kernel,
        )
        return str(answer)

    async def second_turn(self):
        history = self.history(HELLO, MANUAL)
        history.add_message(await self.ask(history))
        yield
        history.add_user_message("And then?")
        await self.ask(history)

    async def structured_output(self):
        answer = await self.ask(self.history(HELLO), response_format=Paint)
        return Paint.model_validate_json(str(answer))

    async def overflow(self):
        await self.ask(self.history(TOO_LONG))


run(Chats)

# /// script
# dependencies = ["haystack-ai"]
# ///
"""Haystack's generator and agent."""

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
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret


def model(**fields):
    return OpenAIChatGenerator(
        model=MODEL,
        api_base_url=V1,
        api_key=Secret.from_token(KEY),
        generation_kwargs={"max_tokens": 60, "temperature": 0} | fields,
        max_retries=0,
    )


class Chats(Checks):
    client = "haystack-ai"
    api = "chat"

    def ask(self, messages, **fields):
        return model(**fields).run(messages)["replies"][0]

    def first_chat(self):
        return self.ask([ChatMessage.from_user(HELLO)]).text

    def stream(self):
        pieces = []
        model().run(
            [ChatMessage.from_user(HELLO)],
            streaming_callback=lambda chunk: pieces.append(chunk.content),
        )
        return pieces

    def tool_round_trip(self):
        agent = Agent(chat_generator=model(), tools=[create_tool_from_function(get_weather)])
        return agent.run([ChatMessage.from_user(QUESTION)])["messages"][-1].text

    def second_turn(self):
        messages = [ChatMessage.from_system(MANUAL), ChatMessage.from_user(HELLO)]
        messages.append(self.ask(messages))
        yield
        self.ask([*messages, ChatMessage.from_user("And then?")])

    def structured_output(self):
        reply = self.ask([ChatMessage.from_user(HELLO)], response_format=Paint)
        return Paint.model_validate_json(reply.text)

    def overflow(self):
        self.ask([ChatMessage.from_user(TOO_LONG)])


run(Chats)

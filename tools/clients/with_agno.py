# /// script
# dependencies = ["agno", "openai"]
# ///
"""Agno's agents, over chats and responses."""

from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.openai import OpenAIResponses
from agno.models.openai.like import OpenAILike
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


class Chats(Checks):
    client = "agno"
    api = "chat"

    def model(self):
        return OpenAILike(id=MODEL, base_url=V1, api_key=KEY, max_tokens=60, temperature=0)

    def agent(self, **fields):
        return Agent(model=self.model(), telemetry=False, **fields)

    def first_chat(self):
        return self.agent().run(HELLO).content

    def stream(self):
        return [event.content for event in self.agent().run(HELLO, stream=True) if event.content]

    def tool_round_trip(self):
        return self.agent(tools=[get_weather]).run(QUESTION).content

    def second_turn(self):
        agent = self.agent(
            system_message=MANUAL, db=InMemoryDb(), add_history_to_context=True, session_id="1"
        )
        agent.run(HELLO)
        yield
        agent.run("And then?")

    def structured_output(self):
        return self.agent(output_schema=Paint).run(HELLO).content

    def overflow(self):
        answer = self.agent().run(TOO_LONG)
        raise RuntimeError(f"{answer.status}: {answer.content}")


class Responses(Chats):
    api = "responses"

    def model(self):
        return OpenAIResponses(
            id=MODEL, base_url=V1, api_key=KEY, max_output_tokens=60, temperature=0
        )


run(Chats, Responses)

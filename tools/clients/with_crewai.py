# /// script
# dependencies = ["crewai"]
# ///
"""CrewAI's language model and agent."""

import os

os.environ["CREWAI_DISABLE_TELEMETRY"] = "true"
os.environ["OTEL_SDK_DISABLED"] = "true"

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
from crewai import LLM, Agent
from crewai.events import LLMStreamChunkEvent, crewai_event_bus
from crewai.tools import tool


class Chats(Checks):
    client = "crewai"
    api = "chat"

    def model(self, **fields):
        return LLM(
            f"openai/{MODEL}", base_url=V1, api_key=KEY, max_tokens=60, temperature=0, **fields
        )

    def first_chat(self):
        return self.model().call(HELLO)

    def stream(self):
        pieces = []
        with crewai_event_bus.scoped_handlers():

            @crewai_event_bus.on(LLMStreamChunkEvent)
            def keep(source, event):
                pieces.append(event.chunk)

            self.model(stream=True).call(HELLO)
            crewai_event_bus.flush()
        return pieces

    async def tool_round_trip(self):
        agent = Agent(
            role="weatherman",
            goal="tell the weather",
            backstory="",
            llm=self.model(),
            tools=[tool(get_weather)],
        )
        return (await agent.kickoff_async(QUESTION)).raw

    def second_turn(self):
        messages = [{"role": "system", "content": MANUAL}, {"role": "user", "content": HELLO}]
        messages.append({"role": "assistant", "content": self.model().call(messages)})
        yield
        self.model().call([*messages, {"role": "user", "content": "And then?"}])

    def structured_output(self):
        return self.model(response_format=Paint).call(HELLO)

    def overflow(self):
        self.model().call(TOO_LONG)


run(Chats)

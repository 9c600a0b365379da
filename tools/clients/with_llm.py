# /// script
# dependencies = ["llm"]
# ///
"""Simon Willison's llm."""

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
from llm.default_plugins.openai_models import Chat

OPTIONS = {"max_tokens": 60, "temperature": 0, "key": KEY}


class Chats(Checks):
    client = "llm"
    api = "chat"
    model = Chat(MODEL, model_name=MODEL, api_base=V1, supports_tools=True, supports_schema=True)

    def first_chat(self):
        return self.model.prompt(HELLO, **OPTIONS).text()

    def stream(self):
        return list(self.model.prompt(HELLO, stream=True, **OPTIONS))

    def tool_round_trip(self):
        chain = self.model.chain(
            QUESTION, tools=[get_weather], key=KEY, options={"max_tokens": 60, "temperature": 0}
        )
        return chain.text()

    def second_turn(self):
        conversation = self.model.conversation()
        conversation.prompt(HELLO, system=MANUAL, **OPTIONS).text()
        yield
        conversation.prompt("And then?", **OPTIONS).text()

    def structured_output(self):
        answer = self.model.prompt(HELLO, schema=Paint, **OPTIONS)
        return Paint.model_validate_json(answer.text())

    def overflow(self):
        self.model.prompt(TOO_LONG, **OPTIONS).text()


run(Chats)

# /// script
# dependencies = ["instructor", "anthropic"]
# ///
"""Instructor, which makes objects of answers, in the modes that a server enforces."""

import instructor
import openai
from checks import HELLO, KEY, MODEL, TOO_LONG, V1, Checks, Paint, run

CLIENT = openai.OpenAI(base_url=V1, api_key=KEY, max_retries=0)
MODES = (
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON_SCHEMA,
)


def ask(client, text):
    return client.create(
        model=MODEL,
        messages=[{"role": "user", "content": text}],
        response_model=Paint,
        max_tokens=60,
        max_retries=0,
    )


class Chats(Checks):
    client = "instructor"
    api = "chat"

    def structured_output(self):
        answers = [ask(instructor.from_openai(CLIENT, mode=mode), HELLO) for mode in MODES]
        assert all(isinstance(answer, Paint) for answer in answers)
        return answers[0]

    def overflow(self):
        ask(instructor.from_openai(CLIENT), TOO_LONG)


class Responses(Checks):
    client = "instructor"
    api = "responses"

    def structured_output(self):
        mode = instructor.Mode.RESPONSES_TOOLS
        return ask(instructor.from_openai(CLIENT, mode=mode), HELLO)


run(Chats, Responses)

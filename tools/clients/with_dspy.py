# /// script
# dependencies = ["dspy"]
# ///
"""DSPy's language model, over chats and responses.

Its adapters demand that the model writes fields of the signature unasked, which a small model does
not.
"""

import dspy
from checks import HELLO, KEY, MANUAL, MODEL, TOO_LONG, V1, Checks, run


class Chats(Checks):
    client = "dspy"
    api = "chat"

    def __init__(self):
        self.model = dspy.LM(
            f"openai/{MODEL}",
            api_base=V1,
            api_key=KEY,
            model_type=self.api,
            max_tokens=60,
            temperature=0,
            cache=False,
            num_retries=0,
        )

    def text(self, answer):
        (first,) = answer
        return first["text"] if isinstance(first, dict) else first

    def first_chat(self):
        return self.text(self.model(HELLO))

    def second_turn(self):
        messages = [{"role": "system", "content": MANUAL}, {"role": "user", "content": HELLO}]
        answer = self.text(self.model(messages=messages))
        yield
        messages.append({"role": "assistant", "content": answer})
        self.model(messages=[*messages, {"role": "user", "content": "And then?"}])

    def overflow(self):
        self.model(TOO_LONG)


class Responses(Chats):
    api = "responses"


run(Chats, Responses)

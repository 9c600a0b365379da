# /// script
# dependencies = ["llama-index-llms-openai-like"]
# ///
"""LlamaIndex's OpenAILike."""

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
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


class Chats(Checks):
    client = "llama-index-llms-openai-like"
    api = "chat"
    model = OpenAILike(
        model=MODEL,
        api_base=V1,
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        max_tokens=60,
        temperature=0,
        max_retries=0,
    )

    def first_chat(self):
        return self.model.chat([ChatMessage(HELLO)]).message.content

    def stream(self):
        return [part.delta for part in self.model.stream_chat([ChatMessage(HELLO)])]

    async def tool_round_trip(self):
        agent = FunctionAgent(tools=[get_weather], llm=self.model)
        return str(await agent.run(QUESTION))

    def second_turn(self):
        messages = [ChatMessage(MANUAL, role="system"), ChatMessage(HELLO)]
        messages.append(self.model.chat(messages).message)
        yield
        self.model.chat([*messages, ChatMessage("And then?")])

    def structured_output(self):
        return self.model.as_structured_llm(Paint).complete(HELLO).raw

    def overflow(self):
        self.model.chat([ChatMessage(TOO_LONG)])


run(Chats)

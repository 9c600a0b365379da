# /// script
# dependencies = ["langchain", "langchain-anthropic", "langchain-openai", "langgraph"]
# ///
"""LangChain's chat models, and an agent of LangGraph."""

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
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver


class Chats(Checks):
    client = "langchain-openai"
    api = "chat"
    method = "json_schema"
    model = ChatOpenAI(
        model=MODEL, base_url=V1, api_key=KEY, max_tokens=60, temperature=0, max_retries=0
    )

    def first_chat(self):
        return self.model.invoke(HELLO).text

    def stream(self):
        return [chunk.text for chunk in self.model.stream(HELLO)]

    def tool_round_trip(self):
        agent = create_agent(self.model, [get_weather])
        answer = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})
        return answer["messages"][-1].text

    def second_turn(self):
        agent = create_agent(self.model, [], system_prompt=MANUAL, checkpointer=InMemorySaver())
        thread = {"configurable": {"thread_id": "1"}}
        agent.invoke({"messages": [{"role": "user", "content": HELLO}]}, thread)
        yield
        agent.invoke({"messages": [{"role": "user", "content": "And then?"}]}, thread)

    def structured_output(self):
        return self.model.with_structured_output(Paint, method=self.method).invoke(HELLO)

    def overflow(self):
        self.model.invoke(TOO_LONG)


class Responses(Chats):
    api = "responses"
    model = ChatOpenAI(
        model=MODEL,
        base_url=V1,
        api_key=KEY,
        max_tokens=60,
        temperature=0,
        max_retries=0,
        use_responses_api=True,
    )


class Messages(Chats):
    client = "langchain-anthropic"
    api = "messages"
    model = ChatAnthropic(
        model=MODEL, base_url=BASE_URL, api_key=KEY, max_tokens=60, temperature=0, max_retries=0
    )


run(Chats, Responses, Messages)

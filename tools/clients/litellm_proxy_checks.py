"""What with_litellm_proxy.py runs against its proxy."""

import with_openai
from checks import run


class Chats(with_openai.Chats):
    client = "litellm"
    api = "proxy: chat"


class Responses(with_openai.Responses):
    client = "litellm"
    api = "proxy: responses"


run(Chats, Responses)

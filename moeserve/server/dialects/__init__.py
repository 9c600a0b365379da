"""The APIs in which conversations come and go.

Each dialect has a module with its handlers (`chat`, `responses`, `messages`, `ollama`), and

- the struct of its request (`*_request`), whose method `chat` converts it to a `ChatRequest`, which
  is the request of `chat` itself,
- a `Writer` (`*_answer`), which makes the events or the whole answer from the parts of an answer.

`completions` and `infill` have no such conversion, because their prompts are not conversations.
Everything else exists once, in `answer`, `conversation`, `terms` and `running`.
"""

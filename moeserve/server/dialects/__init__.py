"""The APIs in which conversations come and go.

Each dialect has a module with its handlers (`chat`, `responses`, `messages`), and

- the struct of its request (`*_request`), whose method `chat` converts it to a `ChatRequest`, which
  is the request of `chat` itself,
- a `Writer` (`*_answer`), which makes the events or the whole answer from the parts of an answer.

`completions` has only a handler and a writer, because its prompts are not conversations. Everything
else exists once, in `answer`, `conversation`, `terms` and `running`.
"""

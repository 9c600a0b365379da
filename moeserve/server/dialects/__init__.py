"""The APIs in which conversations come and go.

Each dialect has a module with its handlers (`chat`, `completions`, `responses`, `messages`) and two
pure functions: its request becomes a `ChatRequest` (`*_request`), and the parts of an answer become
its events or its whole answer (`*_answer`). Everything else exists once, in `answer`,
`conversation`, `terms` and `running`.
"""

"""Text in and out: tokenizer, detokenizer, stop strings, chat templates. No torch."""

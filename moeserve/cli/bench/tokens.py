"""Where a benchmark gets tokens from: a local tokenizer.json, the server itself, or plain numbers."""

from __future__ import annotations

import random
import string
from pathlib import Path
from typing import Any, Protocol

from moeserve.client import AsyncClient
from moeserve.errors import ConfigError, RequestError


class Tokens(Protocol):
    async def encode(self, text: str) -> list[int]: ...

    async def decode(self, ids: list[int]) -> str: ...

    async def pool(self) -> list[int]:
        """Ordinary token ids to draw random prompts from."""
        ...


class LocalTokens:
    """A tokenizer.json on this machine."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(f"--tokenizer: {file} does not exist")
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"--tokenizer: {file}: {error}") from None

    async def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    async def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids)
        return text

    async def pool(self) -> list[int]:
        special = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        return [i for i in range(self._tokenizer.get_vocab_size()) if i not in special]


class ServerTokens:
    """The server's own /tokenize and /detokenize: always the right vocabulary."""

    def __init__(self, client: AsyncClient, model: str) -> None:
        self._client = client
        self._model = model

    async def encode(self, text: str) -> list[int]:
        try:
            return (await self._client.tokenize(text, model=self._model, add_special_tokens=False)).tokens
        except RequestError as error:
            raise ConfigError(
                f"the server cannot tokenize ({error}); give --tokenizer DIR or --random-vocab-size N"
            ) from error

    async def decode(self, ids: list[int]) -> str:
        return (await self._client.detokenize(ids, model=self._model)).prompt

    async def pool(self) -> list[int]:
        rng = random.Random(0)
        words = ("".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 9))) for _ in range(3000))
        return sorted(set(await self.encode(" ".join(words))))


class NumberTokens:
    """Ids 0 .. n-1 and no text, for servers without a tokenizer."""

    def __init__(self, num_ids: int) -> None:
        self._num_ids = num_ids

    async def encode(self, text: str) -> list[int]:
        raise ConfigError("this dataset has text: it needs --tokenizer DIR instead of --random-vocab-size")

    async def decode(self, ids: list[int]) -> str:
        raise ConfigError("the openai-chat backend sends text: it needs --tokenizer DIR instead of --random-vocab-size")

    async def pool(self) -> list[int]:
        return list(range(self._num_ids))

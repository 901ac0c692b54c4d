"""Tokenizers: bytes, or a tokenizer of `transformers` from its folder.

Not supported: tokenizers that need remote code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from shardwise.errors import ConfigError, format_error
from shardwise.train.data.reading.records import import_optional

BYTES = "bytes"
FROM_MODEL = "model"


class Tokenizer(Protocol):
    """Encodes text as token ids below `size`; `begin` and `end` are the ids before and after every document."""

    @property
    def size(self) -> int: ...

    @property
    def begin(self) -> tuple[int, ...]: ...

    @property
    def end(self) -> tuple[int, ...]: ...

    def encode(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def chat(self, messages: Any, prompt: bool) -> str:
        """Format messages by the chat template; `prompt`: with the generation prompt. Raises ConfigError without a template."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """A tokenizer whose tokens are the bytes of UTF-8; a line feed ends a document.

    >>> ByteTokenizer().encode(["ab"])
    [[97, 98]]
    """

    size: int = 256
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = (10,)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(min(255, i) for i in ids).decode("utf-8", errors="replace")

    def chat(self, messages: Any, prompt: bool) -> str:
        raise ConfigError(
            'messages need a tokenizer that says how they are written, and data.tokenizer is "bytes"; give the folder of a tokenizer with '
            "a chat template, or columns of prompts and completions"
        )


@dataclass(frozen=True)
class TransformersTokenizer:
    """A tokenizer of `transformers`."""

    name: str
    library: Any

    @property
    def size(self) -> int:
        return len(self.library)

    @cached_property
    def begin(self) -> tuple[int, ...]:
        first = self.library.bos_token_id
        return (first,) if first is not None and first in self.library("").input_ids else ()

    @cached_property
    def end(self) -> tuple[int, ...]:
        last = self.library.eos_token_id
        last = self.library.sep_token_id if last is None else last
        return () if last is None else (last,)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        tokens: list[list[int]] = self.library(list(texts), add_special_tokens=False, verbose=False).input_ids
        return tokens

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.library.decode(list(ids)))

    def chat(self, messages: Any, prompt: bool) -> str:
        if not getattr(self.library, "chat_template", None):
            raise ConfigError(
                f"the tokenizer {self.name} has no chat template, so it does not say how messages are written; add chat_template.jinja to "
                "its folder, or give columns of prompts and completions"
            )
        return str(self.library.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt))


def tokenizer_of(name: str, model: str) -> Tokenizer:
    """Open the tokenizer of `data.tokenizer`: "bytes", "model" (the folder of an `hf:` model), or a folder or a name of the hub.

    Raises:
        ConfigError: `transformers` is missing, or finds no such tokenizer.
    """
    if name == BYTES:
        return ByteTokenizer()
    if name == FROM_MODEL:
        if not model.startswith("hf:"):
            raise ConfigError(f'data.tokenizer = "model", and {model} comes with none; give "bytes" or the folder of a tokenizer')
        path = Path(model.removeprefix("hf:")).expanduser()
        name = str(path.parent if path.suffix == ".json" else path)
    library = import_optional("transformers", f'data.tokenizer = "{name}"')
    try:
        return TransformersTokenizer(
            name, library.AutoTokenizer.from_pretrained(str(Path(name).expanduser()) if Path(name).exists() else name)
        )
    except Exception as error:
        raise ConfigError(
            f"data.tokenizer: transformers finds no tokenizer in {name}: {format_error(error)}; give a folder that save_pretrained of a "
            f"tokenizer "
            'wrote, a name of the hub where there is a network, or "bytes"'
        ) from error

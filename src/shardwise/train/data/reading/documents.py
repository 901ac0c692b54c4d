"""Tokenization of records into documents: token ids and a loss mask.

A record is text, a prompt with its completion, or messages; for the latter two only the model's answers have a loss.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from shardwise.errors import ConfigError, format_error
from shardwise.train.data.reading.records import DataRecord
from shardwise.train.data.reading.tokenizers import Tokenizer

RecordShape = Literal["auto", "text", "instruction", "messages"]
_RECORDS_PER_CALL = 256  # records that are tokenized in one call
Span = tuple[str, bool]  # a text, and whether its tokens have a loss


@dataclass(frozen=True)
class Document:
    """`ids`: token ids; `loss_mask`: for each, whether the model is trained to predict it."""

    ids: list[int]
    loss_mask: list[bool]


@dataclass(frozen=True)
class Columns:
    """Names of the columns of a record. `prompt` and `completion` are columns, or templates such as "Q: {question}".

    `shape`: "auto" is messages if the first record has them, else a prompt with its completion, else text.
    """

    shape: RecordShape = "auto"
    text: str = "text"
    prompt: str = "prompt"
    completion: str = "completion"
    messages: str = "messages"

    def shape_of(self, values: Mapping[str, Any]) -> RecordShape:
        """Return the shape of the records, given the first of them."""
        if self.shape != "auto":
            return self.shape
        if self.messages in values:
            return "messages"
        if all(name in values for which in (self.prompt, self.completion) for name in template_columns(which)):
            return "instruction"
        return "text"


def template_columns(which: str) -> list[str]:
    """Return the columns that a column name or a template reads.

    >>> template_columns("prompt"), template_columns("Q: {question} {context}")
    (['prompt'], ['question', 'context'])
    """
    if "{" not in which:
        return [which]
    return [name.partition(".")[0].partition("[")[0] for _, name, _, _ in string.Formatter().parse(which) if name]


def documents_of(records: Iterable[DataRecord], columns: Columns, tokenizer: Tokenizer) -> Iterator[Document]:
    """Tokenize records in order; those without text are left out.

    Raises:
        ConfigError: a record without a required column, with its position and its columns.
    """
    read: Callable[[DataRecord], list[Span]] | None = None
    begin, end = tokenizer.begin, tokenizer.end
    remaining = iter(records)
    while chunk := list(islice(remaining, _RECORDS_PER_CALL)):
        if read is None:
            shape = columns.shape_of(chunk[0].values)
            read = _span_reader(shape, columns, tokenizer)
            if shape == "messages":  # the chat template adds both
                begin = end = ()
        spans_of_records = [_check_spans(read(record), record) for record in chunk]
        documents = [spans for spans in spans_of_records if any(text for text, _ in spans)]
        encoded = iter(tokenizer.encode([text for spans in documents for text, _ in spans]))
        for spans in documents:
            ids, learned = list(begin), [spans[0][1]] * len(begin)
            for _, is_learned in spans:
                tokens = next(encoded)
                ids += tokens
                learned += [is_learned] * len(tokens)
            yield Document([*ids, *end], [*learned, *[spans[-1][1]] * len(end)])


def _check_spans(spans: list[Span], record: DataRecord) -> list[Span]:
    """Return the spans of a record. Raises ConfigError for text that no tokenizer can encode: half of a surrogate pair, as in "\\ud800"."""
    for text, _ in spans:
        try:
            text.isascii() or text.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(text[error.start]):04x}"
            raise ConfigError(
                f"{record.where}: character {error.start} of its text is {half}, half of a pair and no character; mend it, or take it out"
            ) from error
    return spans


def _span_reader(shape: RecordShape, columns: Columns, tokenizer: Tokenizer) -> Callable[[DataRecord], list[Span]]:
    match shape:
        case "instruction":
            return lambda record: [(fill_template(record, columns.prompt), False), (fill_template(record, columns.completion), True)]
        case "messages":
            return lambda record: _conversation_spans(record, columns.messages, tokenizer)
        case _:
            return lambda record: [(text_of_column(record, columns.text), True)]


def column_value(record: DataRecord, name: str, key: str) -> Any:
    """Return a record's value in a column. Raises ConfigError if there is no such column."""
    if name not in record.values:
        raise ConfigError(f'{record.where} has no column "{name}", which {key} names; it has {", ".join(record.values)}')
    return record.values[name]


def text_of_column(record: DataRecord, name: str, key: str = "data.text_column") -> str:
    """Return a record's text in a column. Raises ConfigError if it is no text."""
    value = column_value(record, name, key)
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f'{record.where}: byte {error.start} of "{name}" is not UTF-8; convert it, or take the record out') from error
    if not isinstance(value, str):
        raise ConfigError(f'{record.where}: "{name}" is {type(value).__name__}, no text; {key} names a column of text')
    return value


def fill_template(record: DataRecord, which: str) -> str:
    """Return the text of a column, or a template filled with the columns of a record."""
    key = "data.prompt_column or data.completion_column"
    if "{" not in which:
        return text_of_column(record, which, key)
    for name in template_columns(which):
        column_value(record, name, key)
    try:
        return which.format_map(record.values)
    except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise ConfigError(f'{record.where}: the template "{which}" cannot be filled: {error}; write braces that are text twice') from error


def _conversation_spans(record: DataRecord, name: str, tokenizer: Tokenizer) -> list[Span]:
    """Split a conversation, formatted by the chat template, into spans; assistant messages have a loss."""
    messages = column_value(record, name, "data.messages_column")
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in messages):
        raise ConfigError(f'{record.where}: "{name}" is no list of messages, each with "role" and "content"')
    spans: list[Span] = []
    formatted = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            before, after = tokenizer.chat(messages[:number], True), tokenizer.chat(messages[: number + 1], False)
        except ConfigError:
            raise
        except Exception as error:  # of the template, or of a value in it
            raise ConfigError(f"{record.where}: the chat template fails at message {number}: {format_error(error)}; mend it") from error
        if not (before.startswith(formatted) and after.startswith(before)):
            raise ConfigError(
                f"{record.where}: message {number} is written differently once more follow it, by the tokenizer's chat template, so that "
                "what is learned cannot be told apart; use a template that only adds, or columns of prompts and completions"
            )
        spans += [(before[len(formatted) :], False), (after[len(before) :], True)]
        formatted = after
    if not spans:
        raise ConfigError(f'{record.where}: no message of "{name}" has the role "assistant", so nothing would be learned; leave it out')
    return spans

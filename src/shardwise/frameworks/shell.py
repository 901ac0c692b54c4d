"""Command lines and shell scripts as flat keys: variables with defaults, arrays, arithmetic, conditions are followed; nothing runs.

Not followed: functions, loops, `source`, and commands in `$(...)`, whose text is unknown and so empty.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

_ASSIGN = re.compile(r"^(?:export\s+|local\s+|declare\s+\S*\s+)?([A-Za-z_]\w*)(\+?)=(.*)$", re.S)
_LAUNCHERS = (
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate",
    "deepspeed",
    "mpirun",
    "srun",
    "python",
    "python3",
)
_VARIABLE = re.compile(r"\$\{#?(\w+)(?:\[[@*]\])?(?:(:?[-=+])((?:[^{}]|\$\{[^{}]*\})*))?\}|\$(\w+|[@*#])")
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)", re.S)


class ShellScript:
    """A script that is followed line by line; `words` of the last command with options are its command line."""

    def __init__(self, text: str, environment: Mapping[str, str] | None = None) -> None:
        self.variables: dict[str, str] = dict(environment or {})
        self.arrays: dict[str, list[str]] = {}
        self.command: list[str] = []
        self._fixed = set(self.variables)
        self._active = [True]
        self._taken = [False]
        for statement in split_statements(text):
            self._follow(statement)

    def _follow(self, statement: str) -> None:
        word = statement.split(maxsplit=1)[0] if statement.split() else ""
        if word in ("if", "elif", "else", "fi"):
            self._branch(word, statement)
            return
        if not all(self._active):
            return
        if word in ("case", "while", "for", "function") or (statement.endswith(")") and "(" not in statement):
            return
        assigned = _ASSIGN.match(statement)
        if assigned and (assigned[3].lstrip().startswith("(") or _is_single(assigned[3])):
            self._assign(assigned[1], bool(assigned[2]), assigned[3].strip())
            return
        words = self.expand_words(statement)
        self.command = max(self.command, words, key=_count_options)

    def _branch(self, word: str, statement: str) -> None:
        if word == "if":
            true = all(self._active) and self._holds(statement)
            self._active.append(true)
            self._taken.append(true)
        elif word == "fi":
            if len(self._active) > 1:
                self._active.pop()
                self._taken.pop()
        elif len(self._active) > 1:
            true = not self._taken[-1] and all(self._active[:-1]) and (word == "else" or self._holds(statement))
            self._active[-1] = true
            self._taken[-1] = self._taken[-1] or true

    def _holds(self, statement: str) -> bool:
        """Evaluate `[ a = b ]`, `-n`, `-z` and numbers, joined by || and &&; files and all else do not hold."""
        condition = statement.partition(" ")[2].removesuffix("then").strip().rstrip(";")
        if "||" in condition:
            return any(self._holds(f"if {part.strip()}") for part in condition.split("||"))
        if "&&" in condition:
            return all(self._holds(f"if {part.strip()}") for part in condition.split("&&"))
        inner = condition.strip().strip("[]").strip()
        try:
            words = shlex.split(self.expand(inner))
        except ValueError:
            return False
        is_negated = bool(words) and words[0] == "!"
        words = words[1:] if is_negated else words
        if len(words) == 3:
            left, operator, right = words
            if operator in ("=", "==", "!="):
                return ((left == right) != (operator == "!=")) != is_negated
            numbers = {"-eq": 0, "-gt": 1, "-lt": -1}
            if operator in numbers and left.isdecimal() and right.isdecimal():
                return ((int(left) > int(right)) - (int(left) < int(right)) == numbers[operator]) != is_negated
            return False
        if words and words[0] in ("-n", "-z"):
            return ((len(words) > 1 and bool(words[1])) == (words[0] == "-n")) != is_negated
        return len(words) == 1 and words[0] not in ("false", "-n") and not is_negated

    def _assign(self, name: str, is_added: bool, value: str) -> None:
        if value.startswith("("):
            words = self.expand_words(value[1:].removesuffix(")"))
            self.arrays[name] = [*self.arrays.get(name, []), *words] if is_added else words
            return
        if name in self._fixed:
            return
        text = self.expand(_strip_quotes(value))
        self.variables[name] = self.variables.get(name, "") + text if is_added else text

    def expand(self, text: str) -> str:
        """Replace variables and arithmetic by their values; unknown ones by nothing."""
        for _ in range(6):
            before = text
            text = _ARITHMETIC.sub(lambda m: _evaluate_arithmetic(self._expand_variables(m[1]), self.variables), text)
            text = self._expand_variables(text)
            if text == before:
                break
        return re.sub(r"\$\([^()]*\)|`[^`]*`", "", text)

    def _expand_variables(self, text: str) -> str:
        def value_of(match: re.Match[str]) -> str:
            name = match[1] or match[4]
            if name in self.arrays:
                return " ".join(self.arrays[name])
            value = self.variables.get(name, "")
            operator, fallback = match[2], match[3] or ""
            if operator and operator.endswith("+"):
                return fallback if value else ""
            return _strip_quotes(fallback) if operator and not value else value

        return _VARIABLE.sub(value_of, text)

    def expand_words(self, text: str) -> list[str]:
        """Split into words after expansion."""
        try:
            return shlex.split(self.expand(text), comments=True)
        except ValueError:
            return self.expand(text).replace('"', "").replace("'", "").split()


def split_statements(text: str) -> list[str]:
    """Split a script at line ends and semicolons outside of quotes, parentheses and here-documents; comments are dropped."""
    text = re.sub(r"<<-?\s*['\"]?(\w+)['\"]?.*?\n.*?^\s*\1\s*$", "", text, flags=re.S | re.M)
    text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    text = re.sub(r"\\\s*\n", " ", text)
    statements, current, quote, depth, i = [], "", "", 0, 0
    while i < len(text):
        char = text[i]
        if quote:
            quote = "" if char == quote and text[i - 1] != "\\" else quote
        elif char in "\"'" and text[i - 1 : i] != "\\":
            quote = char
        elif char == "#" and (not current or current[-1].isspace()):
            while i < len(text) and text[i] != "\n":
                i += 1
            continue
        elif char in "()":
            depth = max(0, depth + (1 if char == "(" else -1))
        if char in "\n;" and not quote and not depth:
            statements.append(current.strip())
            current = ""
        else:
            current += char
        i += 1
    return [_strip_then(statement) for statement in (*statements, current.strip()) if _strip_then(statement)]


def _strip_then(statement: str) -> str:
    for word in ("then", "do"):
        if statement == word:
            return ""
        if statement.startswith(word + " "):
            return statement[len(word) :].strip()
    return statement


def _is_single(value: str) -> bool:
    """Return whether an assignment is a statement of its own, not the environment of a command."""
    value = value.strip()
    if value[:1] in ("'", '"'):
        end = value.find(value[0], 1)
        return end in (-1, len(value) - 1) or value.count(value[0]) > 2
    return " " not in _ARITHMETIC.sub("0", re.sub(r"\$\{[^}]*\}|\$\([^)]*\)+|`[^`]*`", "x", value))


def _strip_quotes(value: str) -> str:
    value = value.strip()
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value


def _evaluate_arithmetic(text: str, variables: Mapping[str, str]) -> str:
    """Evaluate whole-number arithmetic; 0 where it is none."""
    words = re.sub(r"[A-Za-z_]\w*", lambda m: variables.get(m[0], "0") or "0", text)
    if not re.fullmatch(r"[\d\s+*/%()-]{1,200}", words) or "**" in words:
        return "0"
    try:
        return str(int(eval(words.replace("/", "//"), {"__builtins__": {}})))
    except (SyntaxError, ZeroDivisionError, TypeError, ValueError):
        return "0"


def _count_options(words: list[str]) -> int:
    return sum(word.startswith("--") or "=" in word for word in words) + (8 if any(launcher in words for launcher in _LAUNCHERS) else 0)


def parse_command_line(words: list[str]) -> dict[str, Any]:
    """Return options of a command line as flat keys, dashes as underscores; `.program` has the words that are no options.

    >>> parse_command_line(["torchrun", "--nproc-per-node", "8", "t.py", "--bf16", "a.b=2"])
    {'nproc_per_node': '8', 'bf16': True, 'a.b': '2', '.program': 'torchrun t.py'}
    """
    keys: dict[str, Any] = {}
    program: list[str] = []
    i = 0
    while i < len(words):
        word = words[i]
        following = words[i + 1] if i + 1 < len(words) else "--"
        if word.startswith("-") and not re.fullmatch(r"-\d.*", word) and len(word) > 1:
            name, equals, value = word.lstrip("-").partition("=")
            if " " in name and not equals:
                name, _, value = name.partition(" ")
                equals = "="
            key = name.replace("-", "_")
            if equals:
                keys[key] = value
            elif (
                (following.startswith("-") and not re.fullmatch(r"-\d.*", following)) or following.endswith(".py") or _is_chosen(following)
            ):
                keys[key] = True
            else:
                values: list[str] = []
                while i + 1 < len(words) and _is_value(words[i + 1], bool(values)):
                    values.append(words[i + 1])
                    i += 1
                keys[key] = values[0] if len(values) == 1 else values if values else True
        elif _is_chosen(word):
            group, _, choice = word.partition(":")
            keys[group.replace("-", "_")] = choice
        elif "=" in word and re.match(r"^[+~]{0,2}[\w.]+=", word):
            name, _, value = word.lstrip("+~").partition("=")
            keys[name] = value
        else:
            program.append(word)
        i += 1
    keys[".program"] = " ".join(program)
    return keys


def _is_chosen(word: str) -> bool:
    """Return whether a word chooses one of several groups of options, `activation_checkpoint:full`."""
    return re.fullmatch(r"(activation[_-]checkpoint|[a-z_-]+):[a-z][a-z_-]*", word) is not None and "/" not in word and word.count(":") == 1


def _is_value(word: str, is_later: bool) -> bool:
    if word.endswith(".py") or (word.startswith("-") and not re.fullmatch(r"-\d.*", word)) or re.match(r"^\w+(\.\w+)+=", word):
        return False  # an option, the program, or an override by its path: `trainer.devices=8`
    return not is_later or not (re.match(r"^[\w.]+=", word) or _is_chosen(word))


def read_script(text: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the options of a script's main command as flat keys."""
    script = ShellScript(text, environment)
    inner = [word for word in (*script.command, *script.variables.values()) if word.count(" --") > 1]
    joined = [word for words in script.arrays.values() for word in words]
    candidates = [script.command, *(script.expand_words(word) for word in inner)]
    words = max(candidates, key=_count_options)
    if _count_options(words) < max(4, _count_options(joined) // 2):
        words = joined  # arrays of arguments whose command is not followed
    return parse_command_line([word for text in words for word in (text.split() if text.count(" ") and text.startswith("--") else [text])])

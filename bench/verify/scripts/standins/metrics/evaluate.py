"""Metrics by name, as `evaluate.load` has them, but local and of one kind: the share of predictions that are as the references."""

import json

import numpy as np


class Metric:
    def __init__(self, name):
        self.name, self.held = name, []

    def add_batch(self, predictions, references):
        self.held.append((predictions, references))

    def compute(self, predictions=None, references=None, **kwargs):
        held = self.held if predictions is None else [(predictions, references)]
        pairs = [pair for some, others in held for pair in zip(_listed(some), _listed(others), strict=False)]
        self.held = []
        right = float(np.mean([_plain(a) == _plain(b) for a, b in pairs])) if pairs else 0.0
        names = {
            "sacrebleu": ["score"], "rouge": ["rouge1", "rougeL"], "squad": ["exact_match", "f1"],
            "seqeval": [f"overall_{x}" for x in ("precision", "recall", "f1", "accuracy")],
        }  # fmt: skip
        return dict.fromkeys(names.get(self.name, ["accuracy"]), right)


def _listed(values):
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _plain(value):
    """As text, of SQuAD's what was answered."""
    if isinstance(value, dict):
        value = value.get("prediction_text", value.get("answers", {}).get("text", [""])[0] if "answers" in value else "")
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return json.dumps(value)


def load(name, *args, **kwargs):
    return Metric(name)

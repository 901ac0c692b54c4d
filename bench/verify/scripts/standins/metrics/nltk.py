"""Sentences end at full stops."""


class data:
    @staticmethod
    def find(name):
        return name


def download(*args, **kwargs):
    pass


def sent_tokenize(text):
    return [part.strip() for part in text.split(".") if part.strip()]

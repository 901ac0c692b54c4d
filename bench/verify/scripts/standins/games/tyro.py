"""A dataclass from the command line: `--name value` for each of its fields."""

import argparse
import dataclasses


def cli(kind):
    parser = argparse.ArgumentParser()
    for one in dataclasses.fields(kind):
        parser.add_argument("--" + one.name.replace("_", "-"), type=type(one.default), default=one.default)
    return kind(**vars(parser.parse_args()))

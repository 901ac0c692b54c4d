"""Reports about a plan, a run or a timeline: tables, pictures, and an HTML page."""

from shardwise.callable import make_callable

make_callable(__name__)

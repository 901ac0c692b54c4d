"""What a person sees of a plan, a run or a timeline: tables, text pictures, and a page."""

from weft.callable import make_callable

make_callable(__name__)

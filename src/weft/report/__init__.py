"""What a person sees of a plan, a run or a timeline: tables, text pictures, and a page."""

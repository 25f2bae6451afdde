"""Formats: files read and checked, and written whole or not at all.

    arrays.py      `.npz` files
    schema.py      what a format's arrays must be, declared once
    loads.py       loads and plans, traces of a run
    routes.py      tokens' choices, by token id
    routing_trace.py  traces that Megatron writes itself, as loads
    placement.py   replicas that were placed before the run
    relayout.py    where experts should be
    tables.py      tables as text, in Markdown and in HTML
    recipes.py     where recipes are, and which fits a number of ranks
    yaml_files.py  YAML that holds a mapping
    json_files.py  JSON with null for what is no number
    whole.py       text files written whole, also where the power fails
    run_dir.py     names of what is in a run directory
    locks.py       folders that one process at a time may write

It imports the values of `balance/` that it writes, and no room above.
"""

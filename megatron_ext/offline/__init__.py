"""Planning without a model: load files, generated loads, plans compared.

loads.py        files of loads and plans
synthetic.py    loads from a seed, by what is wrong with them
planning.py     plans for many loads, and the numbers by which they are compared
"""

"""Planning without a model: load files, generated loads, plans compared.

loads.py        files of loads and plans, traces of a run
synthetic.py    loads from a seed, by what is wrong with them
planning.py     plans for many loads, and the numbers by which they are compared
replay.py       every strategy on the same trace
routes.py       files of tokens' choices, by token id
sem_moe.py      Sem-MoE: experts and samples clustered, so that tokens stay
craft.py        CRAFT: replicas by what each layer of a trace gains
relayout.py     EPLB's placement of all experts, for checkpoint time
"""

"""The method, on plain tensors: nothing here knows Megatron.

`docs/map.md` lists the files in the order in which a microbatch passes them.
"""

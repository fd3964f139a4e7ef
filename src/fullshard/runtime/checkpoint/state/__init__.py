"""Everything between the user's objects and what a checkpoint holds: named tensors by rows, and JSON values.

[Note: the JSON value of a key]
`{"kind": KIND, ...}` in the manifest's "state", or in "rank_state" for what each rank has for itself:

    module      "extra": {NAME._extra_state: value}                 tensors KEY/NAME
    optimizer   "groups", "kinds", "values", "others", see `optimizers.py`
                                                                    tensors KEY/PARAMETER'S TENSOR NAME/KIND
    object      "value": what its `state_dict()` returned           tensors KEY/path.in.it
    value       "value": the value                                  the same
    random      "value": states of generators (one of each rank)    tensors KEY@RANK/NAME

Values are written as `values.py` says, tensors inside of them by name.
"""

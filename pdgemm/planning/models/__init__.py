"""How a transformer is divided among ranks: what each layout keeps, moves and takes, before anything runs.

`model_shape` has the sizes of a model, `training_layout` a layout, `kept_arrays` what layers keep, `model_plan` bytes,
words and seconds of a layout, `layout_search` the best ones, and `published_rows` measurements of others to compare.
"""

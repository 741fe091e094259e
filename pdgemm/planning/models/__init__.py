"""How a transformer is divided among ranks: what each layout keeps, moves and takes, before anything runs.

`model_shape` has the sizes of a model, `training_layout` a layout, `stage_state` the parameters of a pipeline stage,
`kept_arrays` what layers keep, `training_step` what stages keep and receive, `step_seconds` its time, and `model_plan`
all of these; `layout_search` finds the best layouts, and `published_rows` has measurements of others to compare with.
"""

"""How a transformer is divided among ranks: what each layout keeps, moves and takes, before anything runs.

`model_shape` has the sizes and layers of a model, `model_layers` the kinds of layers, and a layout of them.
`training_step` sums what the layers of a pipeline stage keep and receive, and `model_plan` their time on a machine,
and finds the best layouts.
"""

"""Every message between ranks: movers of panels, exchanges between layouts, and collectives.

`packed_exchange` carries out any exchange, `collectives` any collective, `movers` broadcast, shift and reduce panels,
and `panels` are the ways of factorisations.  `store` is the only function that writes to a result, `block_copy`
copies rows times columns.  Imports `schedules` and what stands below it; it knows no matrix.
"""

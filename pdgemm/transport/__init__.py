"""Every message between ranks: movers of panels, exchanges between layouts, and collectives.

`packed_exchange` carries out any exchange, `collectives` any collective, `movers` broadcast, shift and reduce panels,
and `panels` moves the panels of factorisations.  `store` is the only function that writes to a result; `block_copy`
copies rows times columns.  The folder imports `schedules` and the folders below `schedules`, but not `matrix`.
"""

"""Services for any program on ranks: agreement, failures and waits among ranks; files, JSON, launchers, text.

`agreement` compares arguments and raises one exception on all ranks, `failures` interrupts ranks that wait for a failed
rank, `waits` and `watchdog` name a rank for which other ranks wait; `files` writes files that are complete or absent,
`file_states` detects changes of files, `json_input` reads values of a stated type, and `launcher` reads the variables
that launchers set.  Imports `local.arrays.dtypes` and `errors`.
"""

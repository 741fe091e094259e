"""What any program on ranks needs: agreement, failures and waits among ranks; files, JSON, launchers, text.

`agreement` compares arguments and raises one exception on all ranks, `failures` wakes those that wait for a failed
rank, `waits` and `watchdog` name a rank for which others wait; `files` and `file_states` have files that are complete
or not there, `json_input` reads values of a stated type, `launcher` what launchers say in the environment.  Imports
`local.arrays.dtypes` and `errors`.
"""

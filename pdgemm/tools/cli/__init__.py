"""The command line: `commands` names the module of each command, `options` the options that they share.

`job` starts MPI when a command needs it, `script` runs a user's script and `short_traceback` prints an error of it.
"""

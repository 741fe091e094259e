"""The command line: `commands` names the module of each command, `options` has the options that commands share.

`job` starts MPI when a command needs it, `script` runs a user's script, and `short_traceback` shortens its errors.
"""

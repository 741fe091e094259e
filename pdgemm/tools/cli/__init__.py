"""The command line: `commands` names the module of each command, `options` has the options that commands share.

`job` starts MPI when a command needs it, and `script` runs a user's script.
"""

"""The processes of a run, from their start to their end.

    launch.py      the ranks of one machine: started, watched, told to stop, started again
    signals.py     a run that is asked to stop, and all ranks agree after which step
    processes.py   processes that end with the process that started them
    watchdog.py    names the rank that hangs, and ends the run
    rendezvous.py  where the machines of a run find each other
    addresses.py   their addresses, and the interfaces that have them
    agent.py       torchrun for one machine of several
    shared_folder.py    whether all machines see one run directory
    cpu_environment.py  what ranks on a CPU must find in their environment

What is started is given: nothing here knows of models or checkpoints.
"""

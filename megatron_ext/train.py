"""`torchrun -m megatron_ext.train`: runs `megatron-ext train` as one rank of a launch."""

from megatron_ext.trainer.ranks.processes import die_with_launcher

if __name__ == "__main__":
    # Before what takes seconds to import.
    die_with_launcher()
    from megatron_ext.trainer.command import main

    main()

"""`torchrun -m megatron_ext.train`: runs `megatron-ext train` as one rank of a launch."""

from megatron_ext.trainer.train import main

if __name__ == "__main__":
    main()

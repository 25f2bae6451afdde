# shellcheck shell=bash
# The environment of ranks on GPUs, a reason for each variable; launch/train.sh reads it. A variable
# that is set stays.

capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1) || true
[[ $capability == [0-9]* ]] || capability= # It prints that there are no devices, too.
if [[ -n $capability ]]; then
    # Threads of a rank on the CPU. PyTorch would take all cores of the machine, in every rank.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
fi

# Queues from the host to a GPU, by its family.
case ${capability%%.*} in
"") ;; # There is no GPU.
[1-9]) # Up to Hopper, only one queue keeps the order of launches, by which Megatron overlaps communication.
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
    ;;
*) # Blackwell keeps the order by itself, and in one queue what waits for a rank holds up the rest.
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32}
    ;;
esac

// Where ranks leave rows of words for each other: a table in the memory of every rank, with a row
// for each rank. The file needs neither Torch nor CUDA.
//
// There are two tables, used in turn. A rank writes the row of generation g when it has all rows of
// g - 1, and the senders of those had read all rows of g - 2. So a table is read before it is
// written again. A row's flag is stored, with release, when its words are there: the generation
// itself.
#pragma once

#include <cstddef>
#include <cstdint>

#include "megatron_ext/host_device.h"

namespace megatron_ext {

struct RowTable {
    int64_t num_ranks;  // R
    int64_t num_words;  // most words of a row

    // Of a rank's memory, zeroed before the first use and aligned to 128.
    MEGATRON_EXT_HOST_DEVICE int64_t bytes() const {
        return 2 * num_ranks * (kLine + num_words * static_cast<int64_t>(sizeof(int64_t)));
    }
    // The row that `rank` leaves in this memory, and its flag.
    MEGATRON_EXT_HOST_DEVICE uint64_t* flag(void* memory, uint64_t generation, int64_t rank) const {
        char* const flags = static_cast<char*>(memory);
        return reinterpret_cast<uint64_t*>(flags + kLine * place(generation, rank));
    }
    MEGATRON_EXT_HOST_DEVICE int64_t* row(void* memory, uint64_t generation, int64_t rank) const {
        char* const rows = static_cast<char*>(memory) + kLine * 2 * num_ranks;
        return reinterpret_cast<int64_t*>(rows) + num_words * place(generation, rank);
    }

    static constexpr int64_t kLine = 128;  // a flag is polled while others are stored

    MEGATRON_EXT_HOST_DEVICE int64_t place(uint64_t generation, int64_t rank) const {
        return static_cast<int64_t>(generation % 2) * num_ranks + rank;
    }
};

}  // namespace megatron_ext

// A step's bookkeeping once more, by row of the sequence table: what growth.py, steps.py and sequence.py say, in a call a
// step. The arrays are Python's (steps_compiled.py). Compiled as one text with prefix_index.cpp before it.
//
// Only rows that own what they write come here: whatever is to be copied first, Python does.

namespace {

using u32 = std::uint32_t;

// The columns of the sequence table, in its order.
enum Column { LENGTHS, COMPUTED, ANNOUNCED, INDEXED, NODES, RELEASED, SUMS, CHANGED, RESHAPED };

constexpr u64 MIX = 0x1E3779B97F4A7C15;

// As `_Arrays` of steps_compiled.py lays it out.
struct Table {
    i64 block_size;
    i64 rows;      // of the columns
    i64 width;     // blocks a row has room for
    i64* numbers;  // [columns, rows]
    i32* blocks;   // [rows, width]
    u32* slots;    // the token of every slot

    i64& at(Column column, i64 row) const { return numbers[column * rows + row]; }
    i32& block(i64 row, i64 place) const { return blocks[row * width + place]; }
};

// What a token adds to the sum of its row.
i64 weight(i64 position, u32 token) { return static_cast<i64>((static_cast<u64>(position) * MIX | 1) * token); }

}  // namespace

extern "C" {

// Of `count` rows that get one token each, how many need a block for it; `most` becomes the place of the last of those
// blocks in its row.
i64 pagegen_steps_growing(const Table* table, i64 count, const i64* rows, i64* most) {
    i64 growing = 0;
    *most = 0;
    for (i64 i = 0; i < count; ++i) {
        const i64 length = table->at(LENGTHS, rows[i]), place = length / table->block_size;
        if (length != place * table->block_size) continue;
        growing += 1;
        if (place > *most) *most = place;
    }
    return growing;
}

// One token more for each row, in the blocks `fresh` where one is needed. `found`: the positions, slots and tokens, and
// then, of the rows that grew, which they are and where in them the new blocks stand.
void pagegen_steps_append(const Table* table, i64 count, const i64* rows, const u32* tokens, i64 growing,
                          const i64* fresh, i64 version, i64* found) {
    i64 *positions = found, *slots = found + count, *ids = found + 2 * count;
    i64 *grown = found + 3 * count, *places = grown + growing;
    for (i64 i = 0; i < count; ++i) {
        const i64 row = rows[i], length = table->at(LENGTHS, row), place = length / table->block_size;
        const i64 offset = length - place * table->block_size;
        if (!offset) {
            table->block(row, place) = static_cast<i32>(*fresh++);
            table->at(CHANGED, row) = version;
            *grown++ = i;
            *places++ = place;
        }
        positions[i] = length;
        slots[i] = table->block(row, place) * table->block_size + offset;
        ids[i] = tokens[i];
        table->slots[slots[i]] = tokens[i];
        table->at(SUMS, row) += weight(length, tokens[i]);
        table->at(LENGTHS, row) = length + 1;
    }
}

// The tokens of `rows` before `ends` are about to be computed, and blocks now full are named. Returns how many blocks had
// their node to themselves until then, which `joined` lists; or -1 - n, having changed nothing, where there must be room
// for n nodes in the index, or n numbers in `joined`, first.
i64 pagegen_steps_announce(const Table* table, Index* index, i64 count, const i64* rows, const i64* ends, i64* joined,
                           i64 room) {
    auto unnamed = [&](i64 i) { return ends[i] / table->block_size - table->at(INDEXED, rows[i]); };
    i64 nodes = 0, found = 0;
    for (i64 i = 0; i < count; ++i) nodes += unnamed(i);
    if (nodes > index->free_count || nodes > room) return -1 - nodes;
    for (i64 i = 0; i < count; ++i) {
        table->at(ANNOUNCED, rows[i]) = table->at(COMPUTED, rows[i]);
        table->at(COMPUTED, rows[i]) = ends[i];
        const i64 more = unnamed(i);
        if (!more) continue;
        const i32* blocks = &table->block(rows[i], table->at(INDEXED, rows[i]));
        const Run run = name_run(
            index, static_cast<i32>(table->at(NODES, rows[i])), more,
            [&](i64 k) { return reinterpret_cast<unsigned char*>(table->slots + blocks[k] * table->block_size); },
            [&](i64 k) { return blocks[k]; }, [&](i32 block) { joined[found++] = block; });
        table->at(NODES, rows[i]) = run.last;
        table->at(INDEXED, rows[i]) += run.named;
    }
    return found;
}

// Notes the tokens of a row's positions from `first` on; those before `start` stand in its blocks already.
void pagegen_steps_write(const Table* table, i64 row, i64 first, i64 start, const u32* tokens, i64 count) {
    i64 sum = 0;
    for (i64 i = 0; i < count; ++i) sum += weight(first + i, tokens[i]);
    table->at(SUMS, row) += sum;
    for (i64 position = start; position < first + count;) {
        const i64 place = position / table->block_size, offset = position - place * table->block_size;
        const i64 left = first + count - position, room = table->block_size - offset, part = left < room ? left : room;
        u32* slot = table->slots + table->block(row, place) * table->block_size + offset;
        std::memcpy(slot, tokens + (position - first), static_cast<std::size_t>(part) * sizeof(u32));
        position += part;
    }
}
}

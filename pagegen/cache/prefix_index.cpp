// The prefix index of prefix.py once more: the same columns, kept in arrays that Python owns (prefix_compiled.py), and
// the same steps, each function here what the method of its name says there. A call does a whole run of blocks.
//
// Nodes are rows of the node columns, and row 0 is no node. A block's name is BLAKE2b (RFC 7693) of 32 bytes over the
// parent's name and the block's tokens, little-endian, as hashlib has it with person=b"pagegen-block".

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using i32 = std::int32_t;
using i64 = std::int64_t;
using u64 = std::uint64_t;

constexpr i64 DIGEST_BYTES = 32;
constexpr i32 NO_BLOCK = -1;
enum State : std::uint8_t { FREE, KNOWN, FORGOTTEN };

// As `_Arrays` of prefix_compiled.py lays it out.
struct Index {
    i64 block_bytes;
    i64 capacity;    // rows of the node columns
    i64 mask;        // entries of `table` - 1; there are 2^n, and at least twice as many as rows
    i64 free_count;  // entries of `free_nodes` that are in use
    std::uint8_t* states;
    i32* parents;
    i32* users;
    i32* latest;
    i32* first;              // a node's first block
    unsigned char* digests;  // [capacity, DIGEST_BYTES]
    unsigned char* tokens;   // [capacity, block_bytes]
    i32* free_nodes;         // a stack
    i32* table;              // the known nodes by their digests: open addressing, 0 where an entry is free
    i32* node_of;            // a block's node
    i32* next_copy;          // a block's next among those of its node
};

// BLAKE2b

constexpr u64 IV[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
                       0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
constexpr std::uint8_t SIGMA[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};
constexpr std::size_t CHUNK = 128;

inline u64 rotate(u64 value, int bits) { return value >> bits | value << (64 - bits); }

template <int ROUND>
inline void one_round(u64* v, const u64* m) {
    constexpr auto& s = SIGMA[ROUND % 10];
    auto mix = [&](int a, int b, int c, int d, u64 x, u64 y) {
        v[a] += v[b] + x;
        v[d] = rotate(v[d] ^ v[a], 32);
        v[c] += v[d];
        v[b] = rotate(v[b] ^ v[c], 24);
        v[a] += v[b] + y;
        v[d] = rotate(v[d] ^ v[a], 16);
        v[c] += v[d];
        v[b] = rotate(v[b] ^ v[c], 63);
    };
    mix(0, 4, 8, 12, m[s[0]], m[s[1]]);
    mix(1, 5, 9, 13, m[s[2]], m[s[3]]);
    mix(2, 6, 10, 14, m[s[4]], m[s[5]]);
    mix(3, 7, 11, 15, m[s[6]], m[s[7]]);
    mix(0, 5, 10, 15, m[s[8]], m[s[9]]);
    mix(1, 6, 11, 12, m[s[10]], m[s[11]]);
    mix(2, 7, 8, 13, m[s[12]], m[s[13]]);
    mix(3, 4, 9, 14, m[s[14]], m[s[15]]);
    if constexpr (ROUND < 11) one_round<ROUND + 1>(v, m);
}

void compress(u64* h, const unsigned char* chunk, u64 bytes_so_far, bool last) {
    u64 v[16], m[16];
    std::memcpy(m, chunk, CHUNK);
    std::memcpy(v, h, 64);
    std::memcpy(v + 8, IV, 64);
    v[12] ^= bytes_so_far;
    if (last) v[14] = ~v[14];
    one_round<0>(v, m);
    for (int i = 0; i < 8; ++i) h[i] ^= v[i] ^ v[i + 8];
}

// The name of a block; `parent` is DIGEST_BYTES long, `tokens` any number of bytes.
void block_digest(const unsigned char* parent, const unsigned char* tokens, std::size_t bytes, unsigned char* digest) {
    u64 h[8], person[2];
    std::memcpy(h, IV, sizeof h);
    std::memcpy(person, "pagegen-block\0\0", sizeof person);
    h[0] ^= 0x01010000 | DIGEST_BYTES;  // no key, sequential
    h[6] ^= person[0];
    h[7] ^= person[1];
    unsigned char chunk[CHUNK];
    std::memcpy(chunk, parent, DIGEST_BYTES);
    std::size_t filled = DIGEST_BYTES, hashed = 0, read = 0;
    for (;;) {
        const std::size_t part = bytes - read < CHUNK - filled ? bytes - read : CHUNK - filled;
        std::memcpy(chunk + filled, tokens + read, part);
        read += part;
        filled += part;
        hashed += filled;
        if (read == bytes) break;
        compress(h, chunk, hashed, false);
        filled = 0;
    }
    std::memset(chunk + filled, 0, CHUNK - filled);
    compress(h, chunk, hashed, true);
    std::memcpy(digest, h, DIGEST_BYTES);
}

// The table of names

unsigned char* digest_of(const Index* index, i32 node) { return index->digests + node * DIGEST_BYTES; }

unsigned char* tokens_of(const Index* index, i32 node) { return index->tokens + node * index->block_bytes; }

bool holds(const Index* index, i32 node, const unsigned char* tokens) {
    return std::memcmp(tokens_of(index, node), tokens, static_cast<std::size_t>(index->block_bytes)) == 0;
}

i64 home(const Index* index, const unsigned char* digest) {
    u64 start;
    std::memcpy(&start, digest, sizeof start);
    return static_cast<i64>(start) & index->mask;
}

// Where the node of a digest stands in the table, or else may be put.
i64 entry(const Index* index, const unsigned char* digest) {
    i64 at = home(index, digest);
    while (index->table[at] && std::memcmp(digest_of(index, index->table[at]), digest, DIGEST_BYTES) != 0)
        at = (at + 1) & index->mask;
    return at;
}

// Forgets the name of a node: nothing finds it any more. It stays for as long as it has users.
void unlink(Index* index, i32 node) {
    i64 gap = home(index, digest_of(index, node));
    while (index->table[gap] != node) gap = (gap + 1) & index->mask;
    for (i64 at = gap;;) {  // entries behind the gap move up, unless they would come to stand before their home
        at = (at + 1) & index->mask;
        const i32 other = index->table[at];
        if (!other) break;
        const i64 from_home = (at - home(index, digest_of(index, other))) & index->mask;
        if (from_home >= ((at - gap) & index->mask)) {
            index->table[gap] = other;
            gap = at;
        }
    }
    index->table[gap] = 0;
    index->states[node] = FORGOTTEN;
    const i32 parent = index->parents[node];
    if (index->latest[parent] == node) index->latest[parent] = 0;
}

// Nodes

// A new known node at a free entry of the table; the caller has seen to it that a row is free.
i32 make(Index* index, i64 at, i32 parent, const unsigned char* digest) {
    const i32 node = index->free_nodes[--index->free_count];
    index->table[at] = node;
    index->states[node] = KNOWN;
    index->parents[node] = parent;
    index->users[node] = index->latest[node] = 0;
    index->first[node] = NO_BLOCK;
    std::memcpy(digest_of(index, node), digest, DIGEST_BYTES);
    if (parent) index->users[parent] += 1;
    return node;
}

// Lets a node go if nothing needs it any more, and then what only it needed.
void prune(Index* index, i32 node) {
    while (node && index->states[node] != FREE && !index->users[node] && index->first[node] == NO_BLOCK) {
        if (index->states[node] == KNOWN) unlink(index, node);
        index->states[node] = FREE;
        index->free_nodes[index->free_count++] = node;
        node = index->parents[node];
        if (node) index->users[node] -= 1;
    }
}

// The known child of a node with such tokens, 0 where there is none.
i32 child_of(const Index* index, i32 parent, const unsigned char* tokens) {
    unsigned char digest[DIGEST_BYTES];
    block_digest(digest_of(index, parent), tokens, static_cast<std::size_t>(index->block_bytes), digest);
    const i32 node = index->table[entry(index, digest)];
    return node && index->parents[node] == parent && holds(index, node, tokens) ? node : 0;
}

// The node of tokens behind a known parent, made if need be; `digest` is its name. 0: a collision.
i32 insert(Index* index, i32 parent, const unsigned char* tokens, const unsigned char* digest) {
    const i64 at = entry(index, digest);
    if (const i32 known = index->table[at])
        return index->parents[known] == parent && holds(index, known, tokens) ? known : 0;
    const i32 node = make(index, at, parent, digest);
    std::memcpy(tokens_of(index, node), tokens, static_cast<std::size_t>(index->block_bytes));
    index->latest[parent] = node;
    return node;
}

bool fill(Index* index, i32 node, i32 block) {
    if (index->node_of[block] == node) return false;
    i32* last = &index->first[node];
    const bool joins = *last != NO_BLOCK;
    while (*last != NO_BLOCK) last = &index->next_copy[*last];
    *last = block;
    index->next_copy[block] = NO_BLOCK;
    index->node_of[block] = node;
    return joins;
}

// What naming a run of blocks comes to: the node of the last one named, and how many were.
struct Run {
    i32 last;
    i64 named;
};

// Names `count` blocks as standing behind `start`, whose user goes over to the last of them; `tokens(i)` are those of
// block i, `block(i)` is its number, and `joined(b)` is told of each that had its node to itself until then.
template <typename Tokens, typename Block, typename Joined>
Run name_run(Index* index, i32 start, i64 count, Tokens tokens, Block block, Joined joined) {
    constexpr i64 AHEAD = 8;  // names are hashed ahead of their use, so that their entries of the table are at hand
    unsigned char digests[AHEAD + 1][DIGEST_BYTES];
    Run run{start, 0};
    if (index->states[start] != KNOWN) return run;
    std::memcpy(digests[AHEAD], digest_of(index, start), DIGEST_BYTES);
    for (i64 begin = 0; begin < count; begin += AHEAD) {
        const i64 end = count < begin + AHEAD ? count : begin + AHEAD;
        const unsigned char* before = digests[AHEAD];
        for (i64 i = begin; i < end; ++i) {
            unsigned char* digest = digests[i - begin];
            block_digest(before, tokens(i), static_cast<std::size_t>(index->block_bytes), digest);
            __builtin_prefetch(index->table + home(index, digest));
            before = digest;
        }
        for (i64 i = begin; i < end; ++i, ++run.named) {
            const i32 child = insert(index, run.last, tokens(i), digests[i - begin]);
            if (!child) break;
            if (fill(index, child, block(i))) joined(index->first[child]);
            run.last = child;
        }
        if (run.named < end) break;
        std::memcpy(digests[AHEAD], before, DIGEST_BYTES);
    }
    if (run.named) {  // the nodes behind it need it from here on
        index->users[start] -= 1;
        index->users[run.last] += 1;
    }
    return run;
}

}  // namespace

extern "C" {

// The table anew, after the columns have grown.
void pagegen_index_rehash(Index* index) {
    for (i64 node = 1; node < index->capacity; ++node)
        if (index->states[node] == KNOWN) {
            const i32 row = static_cast<i32>(node);
            index->table[entry(index, digest_of(index, row))] = row;
        }
}

i64 pagegen_index_find(const Index* index, const unsigned char* digest) { return index->table[entry(index, digest)]; }

i64 pagegen_index_enter_root(Index* index, const unsigned char* digest) {
    const i64 at = entry(index, digest);
    const i32 node = index->table[at] ? index->table[at] : make(index, at, 0, digest);
    if (index->parents[node]) return 0;
    index->users[node] += 1;
    return node;
}

i64 pagegen_index_walk(Index* index, i64 root, const unsigned char* tokens, i64 limit, i64 through_gaps, i32* chain) {
    i32 node = static_cast<i32>(root);
    i64 found = 0;
    for (; found < limit; ++found, tokens += index->block_bytes) {
        i32 child = index->latest[node];
        if (!child || !holds(index, child, tokens)) {
            child = child_of(index, node, tokens);
            if (!child) break;
            index->latest[node] = child;
        }
        if (index->first[child] == NO_BLOCK && !through_gaps) break;
        chain[found] = node = child;
    }
    return found;
}

// Of each of `rows` runs, counts[i] blocks behind nodes[i]: `last` becomes the node of the last one named, `done` how
// many were. Returns how many blocks had their node to themselves until then, which `joined` lists.
i64 pagegen_index_name(Index* index, i64 rows, const i64* nodes, const i64* counts, const i32* blocks,
                       const unsigned char* tokens, i32* last, i32* done, i32* joined) {
    i64 found = 0;
    for (i64 row = 0; row < rows; ++row) {
        const Run run = name_run(
            index, static_cast<i32>(nodes[row]), counts[row], [&](i64 i) { return tokens + i * index->block_bytes; },
            [&](i64 i) { return blocks[i]; }, [&](i32 block) { joined[found++] = block; });
        last[row] = run.last;
        done[row] = static_cast<i32>(run.named);
        blocks += counts[row];
        tokens += counts[row] * index->block_bytes;
    }
    return found;
}

i64 pagegen_index_fill(Index* index, i64 node, i64 block) {
    return fill(index, static_cast<i32>(node), static_cast<i32>(block));
}

void pagegen_index_remove(Index* index, i64 count, const i32* blocks) {
    constexpr i64 AHEAD = 8;  // what lies anywhere in memory is asked for ahead of its use: names, and their entries
    for (; count; --count, ++blocks) {
        if (count > 2 * AHEAD) __builtin_prefetch(digest_of(index, index->node_of[blocks[2 * AHEAD]]));
        if (count > AHEAD)
            __builtin_prefetch(index->table + home(index, digest_of(index, index->node_of[blocks[AHEAD]])));
        const i32 node = index->node_of[*blocks];
        i32* link = &index->first[node];
        while (*link != *blocks) link = &index->next_copy[*link];
        *link = index->next_copy[*blocks];
        index->node_of[*blocks] = 0;
        prune(index, node);
    }
}

void pagegen_index_leave(Index* index, i64 node) {
    index->users[node] -= 1;
    prune(index, static_cast<i32>(node));
}

i64 pagegen_index_forget_behind(Index* index, i64 count, const i32* nodes, i32* blocks) {
    enum : char { NOT_SEEN, START, BEHIND, ELSEWHERE };
    std::vector<char> start(static_cast<std::size_t>(index->capacity), NOT_SEEN), seen(start);
    for (i64 i = 0; i < count; ++i) start[nodes[i]] = START;
    i64 found = 0;
    for (i32 known = 1; known < index->capacity; ++known) {
        if (index->states[known] != KNOWN) continue;
        i32 top = known;
        while (seen[top] == NOT_SEEN && index->parents[top] && !start[index->parents[top]]) top = index->parents[top];
        const char where = seen[top] ? seen[top] : static_cast<char>(index->parents[top] ? BEHIND : ELSEWHERE);
        for (i32 node = known; node != top; node = index->parents[node]) seen[node] = where;
        seen[top] = where;
    }
    for (i32 node = 1; node < index->capacity; ++node) {
        if (seen[node] != BEHIND) continue;
        for (i32 block = index->first[node]; block != NO_BLOCK; block = index->next_copy[block]) {
            index->node_of[block] = 0;
            blocks[found++] = block;
        }
        index->first[node] = NO_BLOCK;
        unlink(index, node);
    }
    for (i32 node = 1; node < index->capacity; ++node)
        if (seen[node] == BEHIND) prune(index, node);
    return found;
}
}

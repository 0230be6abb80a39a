// Calls a function of a library with arguments and memory that arm_machine.py sends on standard input, and answers with
// the memory that the function may write. Numbers are 64-bit integers of the same byte order on both machines.
//
//   request   bytes of the arguments, the arguments, number of regions,
//             of each region its address over there, its bytes and whether it is written, and then all contents
//   answer    the contents of the regions that are written
//
// A region ends where its page does, before one that may not be touched: a byte too far ends the process.
#include "call.hpp"

#include <cstdio>
#include <dlfcn.h>
#include <sys/mman.h>
#include <vector>

namespace {

struct Region {
  int64_t address, bytes, written;
  char* here;
};

void receive(void* to, int64_t bytes) {
  if ((int64_t)std::fread(to, 1, bytes, stdin) != bytes) std::exit(3);
}

int64_t number() {
  int64_t value;
  receive(&value, sizeof value);
  return value;
}

char* before_a_wall(int64_t bytes) {
  const int64_t page = 4096, pages = (bytes + page - 1) / page;
  void* memory = mmap(nullptr, (pages + 1) * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED || mprotect((char*)memory + pages * page, page, PROT_NONE)) std::exit(4);
  return (char*)memory + pages * page - bytes;
}

} // namespace

int main(int, char** argv) {
  void* library = dlopen(argv[1], RTLD_NOW);
  if (!library) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  const auto function = (int64_t(*)(void*))dlsym(library, argv[2]);
  std::vector<int64_t> sent(number() / 8);
  receive(sent.data(), sent.size() * 8);
  std::vector<int64_t> args = sent;
  std::vector<Region> regions(number());
  for (Region& r : regions) {
    r = {number(), number(), number(), nullptr}; // braces are evaluated from left to right
    r.here = before_a_wall(r.bytes);
  }
  for (const Region& r : regions) {
    receive(r.here, r.bytes);
    for (size_t i = 0; i < args.size(); i++)
      if (sent[i] >= r.address && sent[i] < r.address + r.bytes) args[i] = (int64_t)r.here + (sent[i] - r.address);
  }
  if (std::strcmp(argv[2], "pagegen_attention") == 0) {
    auto* a = (pagegen_attention_args*)args.data();
    a->workspace = nullptr;
    a->workspace_bytes = 0;
    a->workspace_bytes = function(a);
    a->workspace = before_a_wall(a->workspace_bytes);
    if (function(a) != 0) return 5;
  } else {
    function(args.data());
  }
  for (const Region& r : regions)
    if (r.written) std::fwrite(r.here, 1, r.bytes, stdout);
  return 0;
}

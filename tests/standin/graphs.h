// Graphs: what a capture notes of memory from before it, its end, and replays. NOTE [ Capture ] is in capture.h.
#pragma once

#include "memory.h"

namespace {

std::map<int64_t, std::unique_ptr<Graph>> graphs;  // that were captured and not dropped

// Note that captured work uses memory. Call it before the work runs.
void note_outside(const void* address, bool writes) {
  Block* block = block_at(address);
  if (!block || block->serial >= capture->first_serial) return;
  auto [found, added] = capture->outside.try_emplace(block->address);
  Outside& outside = found->second;
  if (added) outside.serial = block->serial, outside.writer = block->writer, outside.readers = block->readers;
  if (writes && !outside.written) {
    outside.written = true;
    outside.contents.assign(block->address, block->address + block->nbytes);
  }
}

void record(std::function<void()> run, at::Generator generator = {}, uint64_t offset = 0) {
  capture->work.push_back({std::move(run), std::move(generator), offset});
}

void begin_capture(Queue queue, int64_t pool) {
  TORCH_CHECK(!capture, "a capture is under way");
  TORCH_CHECK(queue.second, "CUDA graphs must be captured on a non-default stream");
  capture = std::make_unique<Graph>(Graph{++last_graph, queue, pool, allocations + 1});
  capture->queues.insert(queue);
  pools[pool]++;
}

void release_pool(int64_t pool) {
  if (!--pools[pool]) pools.erase(pool);
}

// Return the graph's number. Its memory and that from before the capture are as if nothing had run.
int64_t end_capture(Queue queue) {
  TORCH_CHECK(capture, "no capture is under way");
  auto graph = std::move(capture);
  std::string wrong = graph->invalid;
  if (wrong.empty() && queue != graph->origin) wrong = "the capture ends on another stream than it began on";
  for (Queue other : graph->queues) {
    if (clocks[index_of(graph->origin)][index_of(other)] >= clocks[index_of(other)][index_of(other)]) continue;
    if (wrong.empty()) wrong = name(other) + " is unjoined: " + name(graph->origin) + " has not waited for its work";
  }
  for (auto& [address, outside] : graph->outside) {
    Block* block = block_at(address);
    if (!block || block->serial != outside.serial) continue;
    if (outside.written) memcpy(block->address, outside.contents.data(), outside.contents.size());
    block->writer = outside.writer;
    block->readers = outside.readers;
    outside.contents = {};
  }
  for (auto it = graph->host_contents.rbegin(); it != graph->host_contents.rend(); ++it) it->first.copy_(it->second);
  graph->host_contents.clear();
  for (auto& [address, block] : blocks) {
    if (block->pool != graph->pool || block->serial < graph->first_serial) continue;
    memset(block->address, kNaN, block->nbytes);
    block->writer = {};
    block->readers.clear();
  }
  if (!wrong.empty()) {
    release_pool(graph->pool);
    TORCH_CHECK(false, "CUDA error: the capture is invalid (stand-in): ", wrong);
  }
  const int64_t id = graph->id;
  graphs[id] = std::move(graph);
  return id;
}

void drop_graph(int64_t id) {
  auto found = graphs.find(id);
  if (found == graphs.end()) return;
  release_pool(found->second->pool);
  graphs.erase(found);
}

// Run the work of a graph on a stream. If memory that it uses is gone, or other work on it is late, its results are NaN.
void replay_graph(int64_t id, Queue queue) {
  Graph& graph = *graphs.at(id);
  bool right = true;
  {
    std::lock_guard<std::recursive_mutex> lock(device_mutex);
    const Launch launch = ::launch(queue, "the replay of a graph");
    for (const auto& [address, outside] : graph.outside) {
      Block* block = block_at(address);
      if (!block || block->serial != outside.serial) {
        right = false;
        races.push_back("a graph is replayed that uses memory which was freed after the capture");
        continue;
      }
      right &= outside.written ? write(address, launch) : read(address, launch);
    }
    for (auto& [address, block] : blocks) {
      if (block->pool == graph.pool) right &= write(address, launch);
    }
  }
  std::map<c10::GeneratorImpl*, uint64_t> begin;
  for (auto& [impl, draws] : graph.draws) begin[impl] = draws.first.get_offset();
  if (right) {
    c10::impl::ExcludeDispatchKeyGuard unseen(
        c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
    in_kernel = in_replay = true;
    try {
      for (auto& work : graph.work) {
        if (work.generator.defined()) {
          work.generator.set_offset(begin.at(work.generator.unsafeGetGeneratorImpl()) + work.offset);
        }
        work.run();
      }
    } catch (...) {
      in_kernel = in_replay = false;
      throw;
    }
    in_kernel = in_replay = false;
  }
  for (auto& [impl, draws] : graph.draws) draws.first.set_offset(begin.at(impl) + draws.second);
  if (right) return;
  for (auto& [address, block] : blocks) {
    auto outside = graph.outside.find(block->address);
    const bool written = outside != graph.outside.end() && outside->second.written &&
                         outside->second.serial == block->serial;
    if (written || block->pool == graph.pool) memset(block->address, kNaN, block->nbytes);
  }
}

}  // namespace

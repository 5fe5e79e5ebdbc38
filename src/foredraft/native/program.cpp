// A forward pass over the few nodes of a step in one call: inputs are looked up, masks are made, and all layers are
// run.
//
// Between products and attention, operations process node after node in memory that stays in the L1 cache. The result
// of a node does not depend on other nodes. glue.h gives the reasons for operations; the files of attention and
// products give theirs.

#include "cells.h"
#include "glue.h"
#include "nodes.h"
#include "threads.h"

#include <vector>


namespace {

enum { LINE = 64, MOST_SCRATCH_THREADS = 256 };
// Numbers processed by operations from which threads share nodes. For fewer, starting the threads would take longer.
enum { SHARED_NUMBERS = 1 << 14 };

int64_t whole_lines(int64_t bytes) { return rounded_up(bytes, LINE); }

struct Room {  // memory that grows as needed
  std::vector<char> bytes;
  char* of(int64_t size) {
    if ((int64_t)bytes.size() < size + LINE) bytes.resize(size + LINE);
    return (char*)whole_lines((int64_t)bytes.data());
  }
};

struct Work {
  Listed nodes;
  int helpers;  // threads of attention
  std::vector<Attention> calls;
  std::vector<const void*> mask_of;
  std::vector<Room> masks;
  std::vector<char*> inputs;
  std::vector<char*> bases;
  std::vector<int64_t> chosen;
  Room memory, scratch, of_threads, tables, rows;
};

Work& own_work() {
  static thread_local Work work;
  return work;
}

// ---- operations -----------------------------------------------------------------------------------------------------

template <typename T>
T* at(char* base, const Operand& operand, int64_t i, int64_t j) {
  return (T*)base + operand.offset + i * operand.strides[0] + j * operand.strides[1];
}

template <int64_t CODE, typename A, typename Out>
void apply(const Operation& o, char* a, char* b, char* out) {
  for (int64_t i = 0; i < o.sizes[0]; ++i)
    for (int64_t j = 0; j < o.sizes[1]; ++j)
      apply_row<CODE>(o.sizes[2], at<A>(a, o.first, i, j), o.first.strides[2], at<float>(b, o.second, i, j),
                      o.second.strides[2], at<Out>(out, o.out, i, j), o.out.strides[2]);
}

template <typename A>
void copy(const Operation& o, char* a, char* out, int64_t kind) {
  switch (kind) {
    case BFLOAT16: return apply<COPY, A, Bfloat16>(o, a, a, out);
    case FLOAT16: return apply<COPY, A, Float16>(o, a, a, out);
    default: return apply<COPY, A, float>(o, a, a, out);
  }
}

void sum(const Operation& o, char* a, char* out) {
  for (int64_t i = 0; i < o.sizes[0]; ++i)
    for (int64_t j = 0; j < o.sizes[1]; ++j)
      *at<float>(out, o.out, i, j) = sum_of(at<float>(a, o.first, i, j), o.sizes[2]);
}

void find_largest(const Operation& o, char* a, char* out) {
  for (int64_t i = 0; i < o.sizes[0]; ++i)
    for (int64_t j = 0; j < o.sizes[1]; ++j)
      *at<float>(out, o.out, i, j) = largest_of(at<float>(a, o.first, i, j), o.sizes[2]);
}

void put_in_order(const Operation& o, char* a, char* out) {
  static thread_local std::vector<int32_t> order;
  for (int64_t i = 0; i < o.sizes[0]; ++i)
    for (int64_t j = 0; j < o.sizes[1]; ++j)
      write_order(at<float>(a, o.first, i, j), o.sizes[2], at<float>(out, o.out, i, j), o.out.strides[2], order);
}

void gather(const Operation& o, char* a, char* b, char* out) {
  for (int64_t i = 0; i < o.sizes[0]; ++i)
    for (int64_t j = 0; j < o.sizes[1]; ++j) {
      const float *places = at<float>(a, o.first, i, j), *from = at<float>(b, o.second, i, j);
      float* to = at<float>(out, o.out, i, j);
      for (int64_t k = 0; k < o.sizes[2]; ++k)
        to[k * o.out.strides[2]] = from[(int64_t)places[k * o.first.strides[2]] * o.second.strides[2]];
    }
}

void run_operation(const Operation& o, const Base* bases, char* a, char* b, char* out) {
  switch (o.code) {
    case COPY:
      switch (bases[o.first.base].kind) {
        case BFLOAT16: return copy<Bfloat16>(o, a, out, bases[o.out.base].kind);
        case FLOAT16: return copy<Float16>(o, a, out, bases[o.out.base].kind);
        default: return copy<float>(o, a, out, bases[o.out.base].kind);
      }
#define CASE(NAME) case NAME: return apply<NAME, float, float>(o, a, b, out)
    CASE(NEG); CASE(ABS); CASE(RELU); CASE(EXP); CASE(SQRT); CASE(RSQRT); CASE(RECIPROCAL); CASE(SIGMOID); CASE(SILU);
    CASE(TANH); CASE(GELU); CASE(GELU_TANH); CASE(ADD); CASE(SUB); CASE(MUL); CASE(DIV); CASE(LARGER); CASE(SMALLER);
#undef CASE
    case SUM: return sum(o, a, out);
    case PEAK: return find_largest(o, a, out);
    case ORDER: return put_in_order(o, a, out);
    case GATHER: return gather(o, a, b, out);
  }
}

void operate(const Program& program, const Step& step, char* const* bases, int64_t nodes, char* of_threads, int threads) {
  const Operation *first = program.operations + step.first, *last = first + step.count;
  int64_t numbers = 0;
  for (const Operation* o = first; o < last; ++o) numbers += o->sizes[0] * o->sizes[1] * o->sizes[2];
  const int64_t own = whole_lines(program.scratch * sizeof(float));
  share_out(nodes, numbers * nodes < SHARED_NUMBERS ? 1 : threads, [&](int64_t begin, int64_t end, int thread) {
    const auto place = [&](const Operand& operand, int64_t node) {
      const Base& base = program.bases[operand.base];
      return base.role == SCRATCH ? of_threads + thread * own : bases[operand.base] + node * base.bytes;
    };
    for (int64_t node = begin; node < end; ++node)
      for (const Operation* o = first; o < last; ++o)
        run_operation(*o, program.bases, place(o->first, node), place(o->second, node), place(o->out, node));
  });
}

// ---- layers ---------------------------------------------------------------------------------------------------------

void keep(const Listed& nodes, const Attention& call, const char* from, char* to, int64_t row, int64_t head, int64_t size) {
  const int64_t item = item_bytes(call.kind), kind = call.cache_kind;
  for (size_t node = 0; node < nodes.rows.size(); ++node)
    for (int64_t i = 0; i < call.heads; ++i, from += size * item) {
      const int64_t place = nodes.rows[node] * row + i * head + nodes.columns[node] * cell_numbers(kind, size);
      char* cell = to + place * item_bytes(kind);
      if (call.kind == kind)
        memcpy(cell, from, size * item);
      else if (call.kind == FLOAT32)
        write_cell((const float*)from, size, kind, cell);
      else if (call.kind == BFLOAT16)
        write_cell((const Bfloat16*)from, size, kind, cell);
      else
        write_cell((const Float16*)from, size, kind, cell);
    }
}

void attend(const Work& work, const Form& form, int64_t number, const Step& step, char* const* bases, char* keys,
            char* values, char* scratch, int threads) {
  const Attention& call = work.calls[number];
  keep(work.nodes, call, bases[step.key], keys, call.key_row, call.key_head, form.size);
  keep(work.nodes, call, bases[step.value], values, call.value_row, call.value_head, form.value_size);
  foredraft_decode_attention(&call, bases[step.query], keys, values, work.mask_of[number], bases[step.attended],
                             (float*)scratch, threads);
}

const Matrix* first_matrix(const Layer& layer, const Step* from) {
  for (const Step* end = layer.program->steps + layer.program->num_steps; from < end; ++from)
    if (from->kind == PRODUCT) return (const Matrix*)layer.given[from->matrix];
  return nullptr;
}

// Returns whether threads share a product. Those with experts are shared one by one.
bool is_shared(const Model& model, const Layer& layer, const Step& step) {
  const Matrix& matrix = *(const Matrix*)layer.given[step.matrix];
  const int64_t parts = step.kind == GROUPED_PRODUCT ? step.num_experts : 1;
  return matrix.inputs * matrix.outputs / parts >= model.least_shared;
}

struct Around {  // inputs and outputs of a layer's steps in addition to its weights
  char* states;          // hidden states of nodes
  char* const* inputs;   // of the model
  char* const* outputs;  // of the layer
  const Store* store;
  int64_t first_row;
  const Layer* next;     // next layer, or null
};

// Multiplies by the experts that nodes choose, of which there are as many as the router has outputs.
void multiply_chosen(const Matrix& stack, const Step& step, char* const* bases, int64_t nodes, Work& work, int threads) {
  const float* chosen = (const float*)bases[step.chosen];
  work.chosen.assign(chosen, chosen + nodes * step.num_chosen);
  foredraft_grouped_product(&stack, step.num_experts, bases[step.input], step.has_own_inputs ? 1 : step.num_chosen,
                            work.chosen.data(), nodes * step.num_chosen, bases[step.output], threads);
}

void run(const Model& model, const Layer& layer, const Around& around, int64_t nodes, Work& work, int threads) {
  const Program& program = *layer.program;
  char* memory = work.memory.of(program.memory * nodes);
  const int most = threads < MOST_SCRATCH_THREADS ? threads : MOST_SCRATCH_THREADS;
  char* of_threads = work.of_threads.of(whole_lines(program.scratch * sizeof(float)) * most);
  work.bases.resize(program.num_bases);
  char** bases = work.bases.data();
  for (int64_t i = 0; i < program.num_bases; ++i) {
    const Base& base = program.bases[i];
    switch (base.role) {
      case SCRATCH: bases[i] = of_threads; break;
      case MEMORY: bases[i] = memory + base.place * nodes; break;
      case INPUT: bases[i] = base.place ? around.inputs[layer.inputs[base.place - 1]] : around.states; break;
      case GIVEN: bases[i] = (char*)layer.given[base.place]; break;
      case OUTPUT: bases[i] = around.outputs[base.place]; break;
    }
  }
  for (const Step* step = program.steps; step < program.steps + program.num_steps; ++step)
    switch (step->kind) {
      case OPERATIONS: operate(program, *step, bases, nodes, of_threads, most); break;
      case PRODUCT: {
        const Matrix* matrix = (const Matrix*)layer.given[step->matrix];
        const Matrix* after = first_matrix(layer, step + 1);
        if (!after && around.next) after = first_matrix(*around.next, around.next->program->steps);
        if (after) fetch_matrix(*after);
        foredraft_product(matrix, bases[step->input], nodes, bases[step->output], is_shared(model, layer, *step) ? threads : 1);
        break;
      }
      case GROUPED_PRODUCT:
        multiply_chosen(*(const Matrix*)layer.given[step->matrix], *step, bases, nodes, work,
                        is_shared(model, layer, *step) ? threads : 1);
        break;
      case ATTENTION: {
        const Form& form = model.forms[layer.form];
        const Attention& call = work.calls[layer.form];
        const int64_t item = item_bytes(call.cache_kind);
        const Store& store = *around.store;
        attend(work, form, layer.form, *step, bases,
               (char*)store.keys[layer.cache] + around.first_row * call.key_row * item,
               (char*)store.values[layer.cache] + around.first_row * call.value_row * item, work.scratch.of(0), work.helpers);
        break;
      }
    }
}

// ---- rows of nodes --------------------------------------------------------------------------------------------------

// Returns a mask (rows, most, longest) with 0 for visible columns; null if all nodes see all columns.
const void* mask_for(const Nodes& fed, const Form& form, const Listed& nodes, Room& room) {
  if (all_see_all(fed, nodes, form.window)) return nullptr;
  const int64_t item = form.kind == FLOAT32 ? 4 : 2;
  char* mask = room.of(fed.rows * nodes.most * nodes.longest * item);
  write_mask(fed, nodes, form.window, item, mask);
  return mask;
}

// Looks up the rows of a table for all nodes, (nodes, bytes). Returns false for an index outside the table.
bool look_up(const Nodes& fed, const Table& table, char* out) {
  for (int64_t row = 0; row < fed.rows; ++row)
    for (int64_t node = 0; node < fed.counts[row]; ++node, out += table.bytes) {
      const int64_t place = position_of(fed, row, fed.earlier + node) + (fed.offsets ? fed.offsets[row] : 0);
      const int64_t index = table.by_position ? place : fed.tokens[row * fed.width + node];
      if (index < 0 || index >= table.count) return false;
      if (table.matrix)
        foredraft_rows(table.matrix, &index, 1, table.kind, out);
      else
        memcpy(out, table.rows + index * table.bytes, table.bytes);
    }
  return true;
}

// Prepares the attention calls of every form, and their masks.
void prepare(const Model& model, const Store& store, const Nodes& fed, Work& work, int threads) {
  const Listed& nodes = work.nodes;
  int64_t scratch = 0, seen = 0;
  for (int64_t view : nodes.views) seen += view;
  work.helpers = threads;
  for (int64_t i = 0; i < model.num_forms; ++i)
    if (seen * model.forms[i].heads * model.forms[i].size < model.least_shared) work.helpers = 1;
  work.calls.resize(model.num_forms), work.mask_of.resize(model.num_forms);
  if ((int64_t)work.masks.size() < model.num_forms) work.masks.resize(model.num_forms);
  for (int64_t i = 0; i < model.num_forms; ++i) {
    const Form& form = model.forms[i];
    const int64_t key_head = store.columns * cell_numbers(store.kind, form.size);
    const int64_t value_head = store.columns * cell_numbers(store.kind, form.value_size);
    work.calls[i] = {fed.rows, form.heads, form.group, form.size, form.value_size, form.kind, store.kind,
                     form.heads * form.group * form.size, form.size, form.heads * key_head, key_head,
                     form.heads * value_head, value_head, nodes.most * nodes.longest, nodes.longest,
                     fed.counts, nodes.firsts.data(), nodes.views.data(), form.scale};
    work.mask_of[i] = mask_for(fed, form, nodes, work.masks[i]);
    const int64_t needed = foredraft_decode_attention_scratch(&work.calls[i], work.helpers);
    scratch = needed > scratch ? needed : scratch;
  }
  work.scratch.of(scratch * sizeof(float));
}

// Returns the number of threads to keep ready during a forward pass: all, if any product of the model is shared.
int crew_of(const Model& model, int threads) {
  for (const Layer* layer = model.layers; layer < model.layers + model.num_layers; ++layer)
    for (const Step* step = layer->program->steps; step < layer->program->steps + layer->program->num_steps; ++step)
      if ((step->kind == PRODUCT || step->kind == GROUPED_PRODUCT) && is_shared(model, *layer, *step)) return threads;
  return 1;
}

enum { DONE = 0, OUT_OF_RANGE = -1 };

int64_t forward(const Model& model, const Table* tables, const Store& store, const Nodes& fed, const Results& results,
                int threads) {
  Work& work = own_work();
  const int64_t nodes = fed.count;
  work.nodes.take(fed);
  prepare(model, store, fed, work, threads);
  int64_t size = 0;
  for (int64_t i = 0; i < model.num_tables + model.num_computed; ++i) size += whole_lines(nodes * tables[i].bytes);
  char* room = work.tables.of(size);
  work.inputs.resize(model.num_tables + model.num_computed);
  for (int64_t i = 0; i < model.num_tables + model.num_computed; ++i) {
    work.inputs[i] = room, room += whole_lines(nodes * tables[i].bytes);
    if (i < model.num_tables && !look_up(fed, tables[i], work.inputs[i])) return OUT_OF_RANGE;
  }
  Around around = {work.inputs[0], work.inputs.data(), work.inputs.data() + model.num_tables, &store, fed.first_row,
                   nullptr};
  if (model.before) run(model, *model.before, around, nodes, work, threads);
  char *states = results.states, *next = states;
  memcpy(states, work.inputs[model.first], nodes * model.state_bytes);
  around.outputs = &next;
  for (int64_t i = 0; i < model.num_layers; ++i) {
    around.states = states, next = states + nodes * model.state_bytes;
    around.next = i + 1 < model.num_layers ? &model.layers[i + 1] : model.head;
    run(model, model.layers[i], around, nodes, work, threads);
    states = next;
  }
  char* read = results.read;
  around.states = states, around.outputs = &read, around.next = nullptr;
  run(model, *model.behind, around, nodes, work, threads);
  if (!results.num_kept) return DONE;
  around.states = read;
  if (results.kept) {
    around.states = work.rows.of(results.num_kept * model.read_bytes);
    for (int64_t i = 0; i < results.num_kept; ++i)
      memcpy(around.states + i * model.read_bytes, read + results.kept[i] * model.read_bytes, model.read_bytes);
  }
  char* logits = results.logits;
  around.outputs = &logits;
  run(model, *model.head, around, results.num_kept, work, threads);
  return DONE;
}

}  // namespace

// Runs nodes after the tokens in a cache, and writes their keys and values to the cache.
extern "C" int64_t foredraft_forward(const Model* model, const Table* tables, const Store* store, const Nodes* fed,
                                     const Results* results, int threads) {
  int64_t done = DONE;
  if (threads < 1) threads = 1;
  with_crew(crew_of(*model, threads), [&] { done = forward(*model, tables, *store, *fed, *results, threads); });
  return done;
}

static int64_t chains(const Model* model, const Table* tables, const Store* store, const Nodes* fed, const Drafts* drafts,
                      int threads) {
  const int64_t rows = fed->rows;
  std::vector<int64_t> counts(fed->counts, fed->counts + rows), lengths(fed->lengths, fed->lengths + rows), kept;
  std::vector<int64_t> tokens(rows), depths(rows), growing, still;
  std::vector<char> states, read, logits;
  for (int64_t i = 0; i < rows * drafts->most; ++i) drafts->tokens[i] = -1;
  for (int64_t row = 0, at = 0; row < rows; at += counts[row++])
    if (drafts->depths[row] > 0) growing.push_back(row), kept.push_back(at + counts[row] - 1);
  const int64_t num_columns = model->logit_bytes / (model->kind == FLOAT32 ? 4 : 2);
  Nodes next = *fed;
  for (int64_t level = 0;; ++level) {
    states.resize((model->num_layers + 1) * next.count * model->state_bytes), read.resize(next.count * model->read_bytes);
    logits.resize(kept.size() * model->logit_bytes);
    const Results results = {states.data(), read.data(), kept.data(), (int64_t)kept.size(), logits.data()};
    if (forward(*model, tables, *store, next, results, threads) != DONE) return OUT_OF_RANGE;
    for (int64_t row = 0; row < rows; ++row) lengths[row] += counts[row], counts[row] = 0;
    still.clear(), kept.clear();
    for (size_t i = 0; i < growing.size(); ++i) {
      const int64_t row = growing[i];
      const int64_t place = foredraft_argmax_at(logits.data(), model->kind, i, num_columns, drafts->columns);
      if (place < 0) continue;
      const int64_t token = drafts->names ? drafts->names[place] : place;
      drafts->tokens[row * drafts->most + level] = token;
      if (level + 1 == drafts->depths[row]) continue;
      kept.push_back((int64_t)still.size()), still.push_back(row);
      counts[row] = 1, tokens[row] = least(token, drafts->known - 1);
    }
    growing.swap(still);
    if (growing.empty()) return level + 1;
    next = {rows, 1, (int64_t)growing.size(), 0, tokens.data(), depths.data(), counts.data(), lengths.data(), fed->offsets,
            nullptr, fed->first_row};
  }
}

// Runs chains, then drafts the most likely tokens after the last node of every row, one after another. The last drafted
// token of a row is not run. Returns the number of forward passes, or OUT_OF_RANGE.
extern "C" int64_t foredraft_chains(const Model* model, const Table* tables, const Store* store, const Nodes* fed,
                                    const Drafts* drafts, int threads) {
  int64_t done = DONE;
  if (threads < 1) threads = 1;
  with_crew(crew_of(*model, threads), [&] { done = chains(model, tables, store, fed, drafts, threads); });
  return done;
}

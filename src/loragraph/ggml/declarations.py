"""C declarations of the ggml and libllama functions that loragraph calls, for cffi's ABI mode.

`build` compiles them at installation into `_declarations`, so nothing is parsed at run time.

Checked against the headers of ggml 0.25 and 0.26 (llama-cpp-python 0.3.36); `lib.SUPPORTED_GGML`
names the range. Only what is called is declared. Enums are plain ints here: their numbers that
matter are fixed by the GGUF format (types) or listed in `lib` (statuses, log levels).
"""

GGML = """
typedef void (*ggml_log_callback)(int level, const char *text, void *user_data);
typedef void (*ggml_custom_op_t)(struct ggml_tensor *dst, int ith, int nth, void *userdata);

struct ggml_tensor {
    int type;
    void *buffer;
    int64_t ne[4];
    size_t nb[4];
    int op;
    int32_t op_params[16];
    int32_t flags;
    struct ggml_tensor *src[10];
    struct ggml_tensor *view_src;
    size_t view_offs;
    void *data;
    char name[64];
    void *extra;
    char padding[8];
};
struct ggml_init_params { size_t mem_size; void *mem_buffer; bool no_alloc; };

const char *ggml_version(void);
void ggml_log_set(ggml_log_callback callback, void *user_data);
struct ggml_context *ggml_init(struct ggml_init_params params);
void ggml_free(struct ggml_context *ctx);
void ggml_reset(struct ggml_context *ctx);
size_t ggml_used_mem(const struct ggml_context *ctx);
size_t ggml_tensor_overhead(void);
size_t ggml_graph_overhead_custom(size_t size, bool grads);
size_t ggml_nbytes(const struct ggml_tensor *tensor);
size_t ggml_row_size(int type, int64_t ne);
size_t ggml_type_size(int type);
int64_t ggml_blck_size(int type);
const char *ggml_type_name(int type);
const char *ggml_op_desc(const struct ggml_tensor *tensor);
bool ggml_is_contiguous(const struct ggml_tensor *tensor);
bool ggml_is_contiguous_1(const struct ggml_tensor *tensor);

struct ggml_tensor *ggml_new_tensor(struct ggml_context *ctx, int type, int n_dims,
                                    const int64_t *ne);
struct ggml_tensor *ggml_set_name(struct ggml_tensor *tensor, const char *name);
struct ggml_tensor *ggml_get_first_tensor(const struct ggml_context *ctx);
struct ggml_tensor *ggml_get_next_tensor(const struct ggml_context *ctx, struct ggml_tensor *t);
void ggml_set_input(struct ggml_tensor *tensor);
void ggml_set_output(struct ggml_tensor *tensor);

struct ggml_tensor *ggml_add(struct ggml_context *ctx, struct ggml_tensor *a,
                             struct ggml_tensor *b);
struct ggml_tensor *ggml_mul(struct ggml_context *ctx, struct ggml_tensor *a,
                             struct ggml_tensor *b);
struct ggml_tensor *ggml_scale(struct ggml_context *ctx, struct ggml_tensor *a, float s);
struct ggml_tensor *ggml_tanh(struct ggml_context *ctx, struct ggml_tensor *a);
struct ggml_tensor *ggml_swiglu(struct ggml_context *ctx, struct ggml_tensor *a);
struct ggml_tensor *ggml_geglu_split(struct ggml_context *ctx, struct ggml_tensor *a,
                                     struct ggml_tensor *b);
struct ggml_tensor *ggml_swiglu_split(struct ggml_context *ctx, struct ggml_tensor *a,
                                      struct ggml_tensor *b);
struct ggml_tensor *ggml_rms_norm(struct ggml_context *ctx, struct ggml_tensor *a, float eps);
struct ggml_tensor *ggml_mul_mat(struct ggml_context *ctx, struct ggml_tensor *a,
                                 struct ggml_tensor *b);
struct ggml_tensor *ggml_mul_mat_id(struct ggml_context *ctx, struct ggml_tensor *as,
                                    struct ggml_tensor *b, struct ggml_tensor *ids);
struct ggml_tensor *ggml_add_id(struct ggml_context *ctx, struct ggml_tensor *a,
                                struct ggml_tensor *b, struct ggml_tensor *ids);
struct ggml_tensor *ggml_div(struct ggml_context *ctx, struct ggml_tensor *a,
                             struct ggml_tensor *b);
struct ggml_tensor *ggml_sigmoid(struct ggml_context *ctx, struct ggml_tensor *a);
struct ggml_tensor *ggml_soft_max(struct ggml_context *ctx, struct ggml_tensor *a);
struct ggml_tensor *ggml_sum_rows(struct ggml_context *ctx, struct ggml_tensor *a);
struct ggml_tensor *ggml_clamp(struct ggml_context *ctx, struct ggml_tensor *a, float min,
                               float max);
struct ggml_tensor *ggml_fill(struct ggml_context *ctx, struct ggml_tensor *a, float c);
struct ggml_tensor *ggml_arange(struct ggml_context *ctx, float start, float stop, float step);
struct ggml_tensor *ggml_argsort(struct ggml_context *ctx, struct ggml_tensor *a, int order);
struct ggml_tensor *ggml_argsort_top_k(struct ggml_context *ctx, struct ggml_tensor *a, int k);
struct ggml_tensor *ggml_concat(struct ggml_context *ctx, struct ggml_tensor *a,
                                struct ggml_tensor *b, int dim);
struct ggml_tensor *ggml_repeat_4d(struct ggml_context *ctx, struct ggml_tensor *a, int64_t ne0,
                                   int64_t ne1, int64_t ne2, int64_t ne3);
struct ggml_tensor *ggml_reshape_4d(struct ggml_context *ctx, struct ggml_tensor *a, int64_t ne0,
                                    int64_t ne1, int64_t ne2, int64_t ne3);
struct ggml_tensor *ggml_swiglu_oai(struct ggml_context *ctx, struct ggml_tensor *a,
                                    struct ggml_tensor *b, float alpha, float limit);
struct ggml_tensor *ggml_rope_set_offset(struct ggml_tensor *a, int n_offs);
void ggml_soft_max_add_sinks(struct ggml_tensor *a, struct ggml_tensor *sinks);
void ggml_flash_attn_ext_add_sinks(struct ggml_tensor *a, struct ggml_tensor *sinks);
void ggml_mul_mat_set_hint(struct ggml_tensor *a, int hint);
void ggml_mul_mat_set_prec(struct ggml_tensor *a, int prec);
struct ggml_tensor *ggml_cpy(struct ggml_context *ctx, struct ggml_tensor *a,
                             struct ggml_tensor *b);
struct ggml_tensor *ggml_cast(struct ggml_context *ctx, struct ggml_tensor *a, int type);
struct ggml_tensor *ggml_cont(struct ggml_context *ctx, struct ggml_tensor *a);
struct ggml_tensor *ggml_cont_2d(struct ggml_context *ctx, struct ggml_tensor *a, int64_t ne0,
                                 int64_t ne1);
struct ggml_tensor *ggml_reshape_2d(struct ggml_context *ctx, struct ggml_tensor *a, int64_t ne0,
                                    int64_t ne1);
struct ggml_tensor *ggml_reshape_3d(struct ggml_context *ctx, struct ggml_tensor *a, int64_t ne0,
                                    int64_t ne1, int64_t ne2);
struct ggml_tensor *ggml_view_1d(struct ggml_context *ctx, struct ggml_tensor *a, int64_t ne0,
                                 size_t offset);
struct ggml_tensor *ggml_view_2d(struct ggml_context *ctx, struct ggml_tensor *a, int64_t ne0,
                                 int64_t ne1, size_t nb1, size_t offset);
struct ggml_tensor *ggml_view_3d(struct ggml_context *ctx, struct ggml_tensor *a, int64_t ne0,
                                 int64_t ne1, int64_t ne2, size_t nb1, size_t nb2, size_t offset);
struct ggml_tensor *ggml_permute(struct ggml_context *ctx, struct ggml_tensor *a, int axis0,
                                 int axis1, int axis2, int axis3);
struct ggml_tensor *ggml_transpose(struct ggml_context *ctx, struct ggml_tensor *a);
struct ggml_tensor *ggml_get_rows(struct ggml_context *ctx, struct ggml_tensor *a,
                                  struct ggml_tensor *b);
struct ggml_tensor *ggml_set_rows(struct ggml_context *ctx, struct ggml_tensor *a,
                                  struct ggml_tensor *b, struct ggml_tensor *c);
struct ggml_tensor *ggml_soft_max_ext(struct ggml_context *ctx, struct ggml_tensor *a,
                                      struct ggml_tensor *mask, float scale, float max_bias);
struct ggml_tensor *ggml_rope_ext(struct ggml_context *ctx, struct ggml_tensor *a,
                                  struct ggml_tensor *b, struct ggml_tensor *c, int n_dims,
                                  int mode, int n_ctx_orig, float freq_base, float freq_scale,
                                  float ext_factor, float attn_factor, float beta_fast,
                                  float beta_slow);
struct ggml_tensor *ggml_flash_attn_ext(struct ggml_context *ctx, struct ggml_tensor *q,
                                        struct ggml_tensor *k, struct ggml_tensor *v,
                                        struct ggml_tensor *mask, float scale, float max_bias,
                                        float logit_softcap);
void ggml_flash_attn_ext_set_prec(struct ggml_tensor *a, int prec);
struct ggml_tensor *ggml_custom_4d(struct ggml_context *ctx, int type, int64_t ne0, int64_t ne1,
                                   int64_t ne2, int64_t ne3, struct ggml_tensor **args,
                                   int n_args, ggml_custom_op_t fun, int n_tasks, void *userdata);
struct ggml_tensor *ggml_custom_inplace(struct ggml_context *ctx, struct ggml_tensor *a,
                                        struct ggml_tensor **args, int n_args,
                                        ggml_custom_op_t fun, int n_tasks, void *userdata);

void ggml_build_forward_expand(struct ggml_cgraph *graph, struct ggml_tensor *tensor);
struct ggml_cgraph *ggml_new_graph_custom(struct ggml_context *ctx, size_t size, bool grads);
int ggml_graph_size(struct ggml_cgraph *graph);
int ggml_graph_n_nodes(struct ggml_cgraph *graph);
struct ggml_tensor *ggml_graph_node(struct ggml_cgraph *graph, int i);

size_t ggml_quantize_chunk(int type, const float *src, void *dst, int64_t start, int64_t nrows,
                           int64_t n_per_row, const float *imatrix);
bool ggml_quantize_requires_imatrix(int type);
bool ggml_validate_row_data(int type, const void *data, size_t nbytes);

typedef void (*ggml_to_float_t)(const void *x, float *y, int64_t k);
struct ggml_type_traits {
    const char *type_name;
    int64_t blck_size;
    int64_t blck_size_interleave;
    size_t type_size;
    bool is_quantized;
    ggml_to_float_t to_float;
    void *from_float_ref;
};
const struct ggml_type_traits *ggml_get_type_traits(int type);

struct ggml_type_traits_cpu { void *from_float; void *vec_dot; int vec_dot_type; int64_t nrows; };
const struct ggml_type_traits_cpu *ggml_get_type_traits_cpu(int type);

struct ggml_cplan {
    size_t work_size;
    uint8_t *work_data;
    int n_threads;
    struct ggml_threadpool *threadpool;
    void *abort_callback;
    void *abort_callback_data;
    bool use_ref;
};
struct ggml_cplan ggml_graph_plan(const struct ggml_cgraph *graph, int n_threads,
                                  struct ggml_threadpool *threadpool);
int ggml_graph_compute(struct ggml_cgraph *graph, struct ggml_cplan *plan);

struct ggml_threadpool_params {
    bool cpumask[512];
    int n_threads;
    int prio;
    uint32_t poll;
    bool strict_cpu;
    bool paused;
};
struct ggml_threadpool_params ggml_threadpool_params_default(int n_threads);
struct ggml_threadpool *ggml_threadpool_new(struct ggml_threadpool_params *params);
void ggml_threadpool_free(struct ggml_threadpool *threadpool);

void *ggml_gallocr_new(void *buft);
void ggml_gallocr_free(void *galloc);
bool ggml_gallocr_reserve(void *galloc, struct ggml_cgraph *graph);
bool ggml_gallocr_alloc_graph(void *galloc, struct ggml_cgraph *graph);
size_t ggml_gallocr_get_buffer_size(void *galloc, int buffer_id);
void *ggml_backend_alloc_ctx_tensors_from_buft(struct ggml_context *ctx, void *buft);

const char *ggml_backend_buft_name(void *buft);
void *ggml_backend_buft_alloc_buffer(void *buft, size_t size);
size_t ggml_backend_buft_get_alignment(void *buft);
size_t ggml_backend_buft_get_alloc_size(void *buft, const struct ggml_tensor *tensor);
void ggml_backend_buffer_free(void *buffer);
void *ggml_backend_buffer_get_base(void *buffer);
size_t ggml_backend_buffer_get_size(void *buffer);
void ggml_backend_buffer_clear(void *buffer, uint8_t value);
void ggml_backend_buffer_set_usage(void *buffer, int usage);
int ggml_backend_tensor_alloc(void *buffer, struct ggml_tensor *tensor, void *addr);
void ggml_backend_tensor_set(struct ggml_tensor *tensor, const void *data, size_t offset,
                             size_t size);
void ggml_backend_tensor_get(const struct ggml_tensor *tensor, void *data, size_t offset,
                             size_t size);
void *ggml_backend_cpu_buffer_from_ptr(void *ptr, size_t size);
void *ggml_backend_cpu_buffer_type(void);
void *ggml_backend_cpu_init(void);
void ggml_backend_free(void *backend);
void ggml_backend_cpu_set_n_threads(void *backend, int n_threads);
void ggml_backend_cpu_set_threadpool(void *backend, struct ggml_threadpool *threadpool);
void ggml_backend_cpu_set_use_ref(void *backend, bool use_ref);
int ggml_backend_graph_compute(void *backend, struct ggml_cgraph *graph);
void *ggml_backend_get_device(void *backend);
bool ggml_backend_dev_supports_op(void *device, const struct ggml_tensor *op);
void *ggml_backend_dev_backend_reg(void *device);
void *ggml_backend_reg_get_proc_address(void *reg, const char *name);

struct gguf_init_params { bool no_alloc; struct ggml_context **ctx; };
struct gguf_context *gguf_init_from_file(const char *fname, struct gguf_init_params params);
struct gguf_context *gguf_init_empty(void);
struct gguf_context *gguf_init_from_buffer(const void *data, size_t size,
                                           struct gguf_init_params params);
void gguf_free(struct gguf_context *ctx);
void gguf_set_val_u32(struct gguf_context *ctx, const char *key, uint32_t val);
void gguf_set_val_bool(struct gguf_context *ctx, const char *key, bool val);
void gguf_set_val_str(struct gguf_context *ctx, const char *key, const char *val);
void gguf_set_arr_data(struct gguf_context *ctx, const char *key, int type, const void *data,
                       size_t n);
void gguf_set_arr_str(struct gguf_context *ctx, const char *key, const char **data, size_t n);
uint32_t gguf_get_version(const struct gguf_context *ctx);
size_t gguf_get_alignment(const struct gguf_context *ctx);
size_t gguf_get_data_offset(const struct gguf_context *ctx);
int64_t gguf_get_n_kv(const struct gguf_context *ctx);
const char *gguf_get_key(const struct gguf_context *ctx, int64_t key_id);
int gguf_get_kv_type(const struct gguf_context *ctx, int64_t key_id);
int gguf_get_arr_type(const struct gguf_context *ctx, int64_t key_id);
const char *gguf_get_val_str(const struct gguf_context *ctx, int64_t key_id);
const void *gguf_get_val_data(const struct gguf_context *ctx, int64_t key_id);
size_t gguf_get_arr_n(const struct gguf_context *ctx, int64_t key_id);
const void *gguf_get_arr_data(const struct gguf_context *ctx, int64_t key_id);
const char *gguf_get_arr_str(const struct gguf_context *ctx, int64_t key_id, size_t i);
int64_t gguf_get_n_tensors(const struct gguf_context *ctx);
size_t gguf_get_tensor_offset(const struct gguf_context *ctx, int64_t tensor_id);
const char *gguf_get_tensor_name(const struct gguf_context *ctx, int64_t tensor_id);
int gguf_get_tensor_type(const struct gguf_context *ctx, int64_t tensor_id);
size_t gguf_get_tensor_size(const struct gguf_context *ctx, int64_t tensor_id);
const int64_t *gguf_get_tensor_ne(const struct gguf_context *ctx, int64_t tensor_id);
"""

LLAMA = """
typedef int32_t llama_token;
struct llama_model_params {
    void *devices;
    const void *tensor_buft_overrides;
    int32_t n_gpu_layers;
    int split_mode;
    int load_mode;
    int lazy_mode;
    int32_t main_gpu;
    const float *tensor_split;
    void *progress_callback;
    void *progress_callback_user_data;
    const void *kv_overrides;
    bool vocab_only;
    bool check_tensors;
    bool use_extra_bufts;
    bool no_host;
    bool no_alloc;
    bool load_mtp;
};
typedef struct { llama_token id; float logit; float p; } llama_token_data;
typedef struct { llama_token_data *data; size_t size; int64_t selected; bool sorted; }
    llama_token_data_array;
typedef struct { llama_token token; float bias; } llama_logit_bias;
struct llama_sampler_chain_params { bool no_perf; };

void llama_log_set(ggml_log_callback callback, void *user_data);
void llama_log_get(ggml_log_callback *callback, void **user_data);
struct llama_model_params llama_model_default_params(void);
struct llama_model *llama_model_load_from_file(const char *path,
                                               struct llama_model_params params);
struct llama_model *llama_model_init_from_user(struct gguf_context *metadata,
                                               void *set_tensor_data, void *set_tensor_data_ud,
                                               struct llama_model_params params);
void llama_model_free(struct llama_model *model);
const struct llama_vocab *llama_model_get_vocab(const struct llama_model *model);
const char *llama_model_chat_template(const struct llama_model *model, const char *name);
int llama_vocab_type(const struct llama_vocab *vocab);
int32_t llama_vocab_n_tokens(const struct llama_vocab *vocab);
const char *llama_vocab_get_text(const struct llama_vocab *vocab, llama_token token);
float llama_vocab_get_score(const struct llama_vocab *vocab, llama_token token);
int llama_vocab_get_attr(const struct llama_vocab *vocab, llama_token token);
bool llama_vocab_is_eog(const struct llama_vocab *vocab, llama_token token);
bool llama_vocab_is_control(const struct llama_vocab *vocab, llama_token token);
llama_token llama_vocab_bos(const struct llama_vocab *vocab);
llama_token llama_vocab_eos(const struct llama_vocab *vocab);
llama_token llama_vocab_eot(const struct llama_vocab *vocab);
llama_token llama_vocab_sep(const struct llama_vocab *vocab);
llama_token llama_vocab_nl(const struct llama_vocab *vocab);
llama_token llama_vocab_pad(const struct llama_vocab *vocab);
llama_token llama_vocab_mask(const struct llama_vocab *vocab);
bool llama_vocab_get_add_bos(const struct llama_vocab *vocab);
bool llama_vocab_get_add_eos(const struct llama_vocab *vocab);
bool llama_vocab_get_add_sep(const struct llama_vocab *vocab);
llama_token llama_vocab_fim_pre(const struct llama_vocab *vocab);
llama_token llama_vocab_fim_suf(const struct llama_vocab *vocab);
llama_token llama_vocab_fim_mid(const struct llama_vocab *vocab);
llama_token llama_vocab_fim_rep(const struct llama_vocab *vocab);
llama_token llama_vocab_fim_sep(const struct llama_vocab *vocab);
int32_t llama_tokenize(const struct llama_vocab *vocab, const char *text, int32_t text_len,
                       llama_token *tokens, int32_t n_tokens_max, bool add_special,
                       bool parse_special);
int32_t llama_token_to_piece(const struct llama_vocab *vocab, llama_token token, char *buf,
                             int32_t length, int32_t lstrip, bool special);
int32_t llama_detokenize(const struct llama_vocab *vocab, const llama_token *tokens,
                         int32_t n_tokens, char *text, int32_t text_len_max, bool remove_special,
                         bool unparse_special);

struct llama_sampler_chain_params llama_sampler_chain_default_params(void);
struct llama_sampler *llama_sampler_chain_init(struct llama_sampler_chain_params params);
void llama_sampler_chain_add(struct llama_sampler *chain, struct llama_sampler *smpl);
int llama_sampler_chain_n(const struct llama_sampler *chain);
void llama_sampler_apply(struct llama_sampler *smpl, llama_token_data_array *cur_p);
void llama_sampler_accept(struct llama_sampler *smpl, llama_token token);
void llama_sampler_reset(struct llama_sampler *smpl);
struct llama_sampler *llama_sampler_clone(const struct llama_sampler *smpl);
void llama_sampler_free(struct llama_sampler *smpl);
struct llama_sampler *llama_sampler_init_greedy(void);
struct llama_sampler *llama_sampler_init_dist(uint32_t seed);
struct llama_sampler *llama_sampler_init_top_k(int32_t k);
struct llama_sampler *llama_sampler_init_top_p(float p, size_t min_keep);
struct llama_sampler *llama_sampler_init_min_p(float p, size_t min_keep);
struct llama_sampler *llama_sampler_init_typical(float p, size_t min_keep);
struct llama_sampler *llama_sampler_init_temp(float t);
struct llama_sampler *llama_sampler_init_temp_ext(float t, float delta, float exponent);
struct llama_sampler *llama_sampler_init_top_n_sigma(float n);
struct llama_sampler *llama_sampler_init_xtc(float p, float t, size_t min_keep, uint32_t seed);
struct llama_sampler *llama_sampler_init_mirostat(int32_t n_vocab, uint32_t seed, float tau,
                                                  float eta, int32_t m);
struct llama_sampler *llama_sampler_init_mirostat_v2(uint32_t seed, float tau, float eta);
struct llama_sampler *llama_sampler_init_dry(const struct llama_vocab *vocab, float dry_multiplier,
                                             float dry_base, int32_t dry_allowed_length,
                                             int32_t dry_penalty_last_n,
                                             const char **seq_breakers, size_t num_breakers);
struct llama_sampler *llama_sampler_init_grammar(const struct llama_vocab *vocab,
                                                 const char *grammar_str,
                                                 const char *grammar_root);
struct llama_sampler *llama_sampler_init_penalties(int32_t n_vocab, int32_t penalty_last_n,
                                                   float penalty_repeat, float penalty_freq,
                                                   float penalty_present);
struct llama_sampler *llama_sampler_init_logit_bias(int32_t n_vocab, int32_t n_logit_bias,
                                                    const llama_logit_bias *logit_bias);
"""

LIBC = """
int madvise(void *address, size_t length, int advice);
"""

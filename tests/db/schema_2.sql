BEGIN TRANSACTION;
CREATE TABLE compile_facts (
	id INTEGER NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	kernel_id INTEGER NOT NULL, 
	variant_id INTEGER NOT NULL, 
	environment_id INTEGER NOT NULL, 
	form VARCHAR(16) NOT NULL, 
	registers BIGINT, 
	spills BIGINT, 
	shared_bytes BIGINT, 
	num_warps BIGINT, 
	programs_per_unit BIGINT, 
	binary_bytes BIGINT, 
	loop TEXT NOT NULL, 
	created_at VARCHAR(40) NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (digest), 
	FOREIGN KEY(kernel_id) REFERENCES kernels (id), 
	FOREIGN KEY(variant_id) REFERENCES variants (id), 
	FOREIGN KEY(environment_id) REFERENCES environments (id)
);
INSERT INTO "compile_facts" VALUES(1,'ca46afbedbeeb1f1ff1748cef555b2e08cdb0a1229568733a9b83cfdb70c8fc4',1,1,4,'decode',90,0,4096,4,4,9000,'{"matrix":16}','2026-01-01');
CREATE TABLE devices (
	id INTEGER NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	identity VARCHAR(64) NOT NULL, 
	name TEXT NOT NULL, 
	target VARCHAR(32) NOT NULL, 
	units INTEGER NOT NULL, 
	memory_gib FLOAT NOT NULL, 
	bandwidth_gb_s FLOAT NOT NULL, 
	matrix_tflops FLOAT NOT NULL, 
	data TEXT NOT NULL, last_level_cache_mib FLOAT DEFAULT '0' NOT NULL, shared_memory_kib FLOAT DEFAULT '0' NOT NULL, core_clock_mhz FLOAT DEFAULT '0' NOT NULL, memory_clock_mhz FLOAT DEFAULT '0' NOT NULL, power_limit_w FLOAT DEFAULT '0' NOT NULL, registers_per_unit INTEGER DEFAULT '0' NOT NULL, max_threads_per_unit INTEGER DEFAULT '0' NOT NULL, partition TEXT DEFAULT '' NOT NULL, features TEXT DEFAULT '' NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (digest)
);
INSERT INTO "devices" VALUES(1,'1e491f26b93fba4e875e9dafa6811d86a71acef30fbbc6d9314abdc6e11a44af','8fb163f2ff729ac3642082047e862b17e3021d611cae04f5de0e8c0d00bd696d','NVIDIA H100 80GB HBM3','sm_90',132,80.0,3350.0,989.0,'{"device":{"bandwidth_gb_s":3350.0,"features":[],"last_level_cache_mib":50.0,"matrix_tflops":989.0,"max_threads_per_unit":2048,"memory_gib":80.0,"name":"NVIDIA H100 80GB HBM3","registers_per_unit":65536,"shared_memory_kib":227.0,"target":"sm_90","units":132},"v":1}',50.0,227.0,0.0,0.0,0.0,65536,2048,'','');
INSERT INTO "devices" VALUES(2,'404eec73c510cfdd5892cced4d3a6e34f5d4a0d4531458d362603cb0a45565d6','6a62c25cae2c990b7f47e8c3b0216f78a4b6fd6102fbf506983f47287ee5e3ed','fake CPU','cpu',4,15.6,40.0,0.0,'{"device":{"bandwidth_gb_s":40.0,"features":["avx2","fma"],"last_level_cache_mib":32.0,"matrix_tflops":0.0,"max_threads_per_unit":0,"memory_gib":15.6,"name":"fake CPU","registers_per_unit":0,"shared_memory_kib":0.0,"target":"cpu","units":4},"v":1}',32.0,0.0,0.0,0.0,0.0,0,0,'','avx2 fma');
CREATE TABLE environments (
	id INTEGER NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	data TEXT NOT NULL, identity VARCHAR(64) DEFAULT '' NOT NULL, pagegen TEXT DEFAULT '' NOT NULL, torch TEXT DEFAULT '' NOT NULL, triton TEXT DEFAULT '' NOT NULL, compiler TEXT DEFAULT '' NOT NULL, driver TEXT DEFAULT '' NOT NULL, runtime TEXT DEFAULT '' NOT NULL, python TEXT DEFAULT '' NOT NULL, system TEXT DEFAULT '' NOT NULL, threads TEXT DEFAULT '' NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (digest)
);
INSERT INTO "environments" VALUES(1,'18e6c718dc49ce4f3518c6612cff4dc59e5f47bae7e86981957c5cfe26dfc207','{"environment":{"driver":"570","torch":"2.13.0"},"v":1}','18e6c718dc49ce4f3518c6612cff4dc59e5f47bae7e86981957c5cfe26dfc207','','2.13.0','','','570','','','','');
INSERT INTO "environments" VALUES(2,'6a4bcad91f631e5a2f7f02f47475bcdc629de5b2ef4edee18eee6c8d0c31bd46','{"environment":{"driver":"570","torch":"2.13.0","tuning_purpose":"confirm","tuning_session":"s1"},"v":1}','18e6c718dc49ce4f3518c6612cff4dc59e5f47bae7e86981957c5cfe26dfc207','','2.13.0','','','570','','','','');
INSERT INTO "environments" VALUES(3,'a4ca889b2646e0fdcc3d78882146fa32d42c15bad3cf66dd91486fcffa5bf1c5','{"environment":{"compiler":"g++ 12","python":"3.11.2","system":"Linux 6.1","threads":"4","torch":"2.13.0"},"v":1}','a4ca889b2646e0fdcc3d78882146fa32d42c15bad3cf66dd91486fcffa5bf1c5','','2.13.0','','g++ 12','','','3.11.2','Linux 6.1','4');
INSERT INTO "environments" VALUES(4,'418811c5a3748584524b86e5be8a2dfa85509cf516a7ac06accbe97453040d18','{"environment":{"compiler":"triton 3.7.1"},"v":1}','418811c5a3748584524b86e5be8a2dfa85509cf516a7ac06accbe97453040d18','','','','triton 3.7.1','','','','','');
INSERT INTO "environments" VALUES(5,'88382764e69cc9e1ffb5f7dde8cbcd6cc1008738a187bcc8ffa6ae5a80190c25','{"environment":{"driver":"570","torch":"2.13.0","tuning_purpose":"search","tuning_session":"s"},"v":1}','18e6c718dc49ce4f3518c6612cff4dc59e5f47bae7e86981957c5cfe26dfc207','','2.13.0','','','570','','','','');
CREATE TABLE extras (
	id INTEGER NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	record TEXT NOT NULL, 
	owner VARCHAR(64) NOT NULL, 
	field TEXT NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (digest)
);
INSERT INTO "extras" VALUES(1,'6f2ac79f586ec82e408661d07731faf458734cf997918414890c62415856dbe9','weather','','','{"record":"weather","sky":"blue"}');
CREATE TABLE kernels (
	id INTEGER NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	spec_digest VARCHAR(64) NOT NULL, 
	num_q_heads INTEGER NOT NULL, 
	num_kv_heads INTEGER NOT NULL, 
	head_dim INTEGER NOT NULL, 
	v_head_dim INTEGER NOT NULL, 
	q_dtype VARCHAR(32) NOT NULL, 
	kv_dtype VARCHAR(32) NOT NULL, 
	scale FLOAT NOT NULL, 
	causal INTEGER NOT NULL, 
	window INTEGER, 
	logit_softcap FLOAT, 
	alibi INTEGER NOT NULL, 
	sinks INTEGER NOT NULL, 
	kv_scale_granularity VARCHAR(32) NOT NULL, 
	shared_kv INTEGER NOT NULL, 
	score_mod TEXT, 
	mask_mod TEXT, 
	batch_invariant INTEGER NOT NULL, 
	block_size INTEGER NOT NULL, 
	block_order VARCHAR(8) NOT NULL, 
	target VARCHAR(32) NOT NULL, 
	code_hash TEXT NOT NULL, 
	data TEXT NOT NULL, kv_zero_points INTEGER DEFAULT '0' NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (digest)
);
INSERT INTO "kernels" VALUES(1,'bf74d07b409da7ecb914e73743a89d4258256d8aa0228a161358d8193816d2b9','61cab3f050ece1240bad7147bffe0d809a26a26a33c06e5c212cb0d8700ccc9b',32,8,128,128,'bfloat16','bfloat16',8.83883476483184327143e-02,1,NULL,NULL,0,0,'none',0,NULL,NULL,0,16,'NHD','sm_90','c0de','{"code_hash":"c0de","layout":{"block_size":16,"order":"NHD"},"spec":{"alibi":false,"batch_invariant":false,"causal":true,"head_dim":128,"kv_dtype":"bfloat16","kv_scale_granularity":"none","kv_zero_points":false,"logit_softcap":null,"mask_mod":null,"num_kv_heads":8,"num_q_heads":32,"q_dtype":"bfloat16","scale":0.08838834764831843,"score_mod":null,"shared_kv":false,"sinks":false,"v_head_dim":128,"window":null},"target":"sm_90","v":1}',0);
INSERT INTO "kernels" VALUES(2,'113034e0b6e1898e2e715a3147236440853fb6bac14e98c8d476bb4d4d90e624','61cab3f050ece1240bad7147bffe0d809a26a26a33c06e5c212cb0d8700ccc9b',32,8,128,128,'bfloat16','bfloat16',8.83883476483184327143e-02,1,NULL,NULL,0,0,'none',0,NULL,NULL,0,16,'NHD','cpu','cpp','{"code_hash":"cpp","layout":{"block_size":16,"order":"NHD"},"spec":{"alibi":false,"batch_invariant":false,"causal":true,"head_dim":128,"kv_dtype":"bfloat16","kv_scale_granularity":"none","kv_zero_points":false,"logit_softcap":null,"mask_mod":null,"num_kv_heads":8,"num_q_heads":32,"q_dtype":"bfloat16","scale":0.08838834764831843,"score_mod":null,"shared_kv":false,"sinks":false,"v_head_dim":128,"window":null},"target":"cpu","v":1}',0);
INSERT INTO "kernels" VALUES(3,'794e608310d7588f13d76962b993aff66764cedbf5fb396b5b5b58beb3bdecb6','1d8df8408eb21de09f5f1a897462957913cefddf3d3e559dc9c51803685f4b1b',32,8,128,128,'bfloat16','int4',8.83883476483184327143e-02,1,NULL,NULL,0,0,'token_head',0,NULL,NULL,0,32,'HND','sm_90','c0de','{"code_hash":"c0de","layout":{"block_size":32,"order":"HND"},"spec":{"alibi":false,"batch_invariant":false,"causal":true,"head_dim":128,"kv_dtype":"int4","kv_scale_granularity":"token_head","kv_zero_points":true,"logit_softcap":null,"mask_mod":null,"num_kv_heads":8,"num_q_heads":32,"q_dtype":"bfloat16","scale":0.08838834764831843,"score_mod":null,"shared_kv":false,"sinks":false,"v_head_dim":128,"window":null},"target":"sm_90","v":1}',1);
INSERT INTO "kernels" VALUES(4,'10acb3bdeb8efaa29bc68d6e338cff37b9116200af0a1689f745db826de4ad7b','61cab3f050ece1240bad7147bffe0d809a26a26a33c06e5c212cb0d8700ccc9b',32,8,128,128,'bfloat16','bfloat16',8.83883476483184327143e-02,1,NULL,NULL,0,0,'none',0,NULL,NULL,0,16,'NHD','sm_90','old','{"code_hash":"old","layout":{"block_size":16,"order":"NHD"},"spec":{"alibi":false,"batch_invariant":false,"causal":true,"head_dim":128,"kv_dtype":"bfloat16","kv_scale_granularity":"none","kv_zero_points":false,"logit_softcap":null,"mask_mod":null,"num_kv_heads":8,"num_q_heads":32,"q_dtype":"bfloat16","scale":0.08838834764831843,"score_mod":null,"shared_kv":false,"sinks":false,"v_head_dim":128,"window":null},"target":"sm_90","v":1}',0);
CREATE TABLE pagegen_revision (
	version_num VARCHAR(32) NOT NULL, 
	PRIMARY KEY (version_num)
);
INSERT INTO "pagegen_revision" VALUES('0002');
CREATE TABLE pagegen_schema (
	version INTEGER NOT NULL
);
INSERT INTO "pagegen_schema" VALUES(2);
CREATE TABLE portfolios (
	id INTEGER NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	kernel_id INTEGER NOT NULL, 
	device_id INTEGER NOT NULL, 
	profile_id INTEGER NOT NULL, 
	rule TEXT NOT NULL, 
	created_at VARCHAR(40) NOT NULL, kind TEXT DEFAULT '' NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (digest), 
	FOREIGN KEY(kernel_id) REFERENCES kernels (id), 
	FOREIGN KEY(device_id) REFERENCES devices (id), 
	FOREIGN KEY(profile_id) REFERENCES profiles (id)
);
INSERT INTO "portfolios" VALUES(1,'e7655ecb8f434c8c3936a059a75aaf412480ffbeff60b7cf854cd4d3998dd507',1,1,1,'{"clauses":[{"max_context_len":null,"max_num_seqs":null,"max_query_len":null,"variant":{"dot":"mma","family":"triton","head_pieces":"padded","loads":"pointer","num_splits":4,"num_stages":2,"num_warps":4,"page_walk":"pages_in_tile","programs":0,"reduce":"kernel","split_tokens":0,"tile_kv":32,"tile_rows":16,"warp_specialize":false}}],"distance":0.0,"evidence":{"kind":"measured","trials":3},"reason":"tuned on fake traffic"}','2026-01-01T00:00:00','measured');
INSERT INTO "portfolios" VALUES(2,'35445d40bcfdca491a270dfef6b0eb5c09c323b82b4b0596fa7f4b60206b909e',4,1,1,'{"clauses":[{"max_context_len":null,"max_num_seqs":null,"max_query_len":null,"variant":{"dot":"mma","family":"triton","head_pieces":"padded","loads":"pointer","num_splits":4,"num_stages":2,"num_warps":4,"page_walk":"pages_in_tile","programs":0,"reduce":"kernel","split_tokens":0,"tile_kv":32,"tile_rows":16,"warp_specialize":false}}],"distance":0.0,"evidence":{"kind":"predicted","trials":3},"reason":"tuned on fake traffic"}','2026-01-02T00:00:00','predicted');
CREATE TABLE predictions (
	id INTEGER NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	kernel_id INTEGER NOT NULL, 
	device_id INTEGER NOT NULL, 
	variant_id INTEGER NOT NULL, 
	workload_id INTEGER NOT NULL, 
	predicted_us FLOAT NOT NULL, 
	model TEXT NOT NULL, 
	created_at VARCHAR(40) NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (digest), 
	FOREIGN KEY(kernel_id) REFERENCES kernels (id), 
	FOREIGN KEY(device_id) REFERENCES devices (id), 
	FOREIGN KEY(variant_id) REFERENCES variants (id), 
	FOREIGN KEY(workload_id) REFERENCES workloads (id)
);
INSERT INTO "predictions" VALUES(1,'74989393ab109055bb596daf19f524bfb7e495904f824b99c3650edc7df13d36',1,1,1,2,12.5,'a model','2026-01-01');
CREATE TABLE profiles (
	id INTEGER NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	name TEXT NOT NULL, 
	source TEXT NOT NULL, 
	data TEXT NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (digest)
);
INSERT INTO "profiles" VALUES(1,'f7fa1b0a1a677ae86ebcf01b2d4333b0196e3249bf11fa4b1a367ccb7a139c7a','fake traffic','made up','{"profile":{"batches":[{"context_lens":[1000,3000,17],"query_lens":[1,1,1],"weight":0.75},{"context_lens":[500,64],"query_lens":[1,64],"weight":0.25}],"figures":{"p50":7},"licence":"","name":"fake traffic","source":"made up","version":1},"v":1}');
CREATE TABLE trials (
	id INTEGER NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	"key" VARCHAR(64) NOT NULL, 
	kernel_id INTEGER NOT NULL, 
	device_id INTEGER NOT NULL, 
	environment_id INTEGER NOT NULL, 
	variant_id INTEGER NOT NULL, 
	workload_id INTEGER NOT NULL, 
	regime VARCHAR(32) NOT NULL, 
	status VARCHAR(32) NOT NULL, 
	median_us FLOAT, 
	samples_us TEXT NOT NULL, 
	max_error TEXT, 
	detail TEXT NOT NULL, 
	created_at VARCHAR(40) NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (digest), 
	FOREIGN KEY(kernel_id) REFERENCES kernels (id), 
	FOREIGN KEY(device_id) REFERENCES devices (id), 
	FOREIGN KEY(environment_id) REFERENCES environments (id), 
	FOREIGN KEY(variant_id) REFERENCES variants (id), 
	FOREIGN KEY(workload_id) REFERENCES workloads (id)
);
INSERT INTO "trials" VALUES(1,'fe391199522cd7ca1919a97e6f5abcb17a81dc58548e328c51f1002a67d497c0','43e1515b7223a7bda83e8b9def6c7da6a1712b7e849076bfc69a6a1ce3c39164',1,1,1,1,1,'cold','ok',100.125,'[101.5,99.25,100.125]','0.0009765625','','2026-01-02T03:04:05.678+00:00');
INSERT INTO "trials" VALUES(2,'6e750ccb458d226e2a9cdec6409216f6ca9e28e22444f2185e387ae1a1540e9b','43e1515b7223a7bda83e8b9def6c7da6a1712b7e849076bfc69a6a1ce3c39164',1,1,2,1,1,'cold','ok',98.0,'[98.0]','0.0009765625','','2026-01-02T03:04:05.678+00:00');
INSERT INTO "trials" VALUES(3,'7d74f3b3f963e6f8d14447c95f1e7aa3870fd0b78c888ed11dd01b33240eeaf6','dc208be548d2a228a00f0efa26b8e977472d04f3d4b96fda4792842383e2186d',2,2,3,2,1,'cold','ok',100.125,'[101.5,99.25,100.125]','0.0009765625','','2026-01-02T03:04:05.678+00:00');
INSERT INTO "trials" VALUES(4,'4ff24b15d98b49ae92d6651a3045077b6461442c3b2efa1c77fb45449f9dbd93','43e1515b7223a7bda83e8b9def6c7da6a1712b7e849076bfc69a6a1ce3c39164',1,1,1,1,1,'cold','wrong_result',NULL,'[]','inf','max error at [3, 1]','2026-01-02T03:04:05.678+00:00');
INSERT INTO "trials" VALUES(5,'bfcd9f938f6ca419a10af3a0c14a2ef2e115d187db7079088a85df066f192d55','398d436f840d856e87aeb34124f5d58cbdb337f5029d9f55cdd98eb0765b41ff',3,1,1,1,2,'warm','ok',100.125,'[101.5,99.25,100.125]','0.0009765625','','2026-01-02T03:04:05.678+00:00');
INSERT INTO "trials" VALUES(6,'53465e9b5472207867ac3fb62e0e9e741a048bc144517e3d36d8f8b63cf86abe','43e1515b7223a7bda83e8b9def6c7da6a1712b7e849076bfc69a6a1ce3c39164',1,1,5,1,1,'cold','ok',80.875,'[80.25,81.5]','0.0009765625','','2026-01-02T03:04:05.678+00:00');
CREATE TABLE variants (
	id INTEGER NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	family VARCHAR(32) NOT NULL, 
	name TEXT NOT NULL, 
	data TEXT NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (digest)
);
INSERT INTO "variants" VALUES(1,'3b721997709a0b68870b1a246e5582efa404b212de7773a92b6441a34e7b696d','triton','triton:tile_rows=16,tile_kv=32,page_walk=pages_in_tile,num_splits=4,num_warps=4,num_stages=2','{"v":1,"variant":{"dot":"mma","family":"triton","head_pieces":"padded","loads":"pointer","num_splits":4,"num_stages":2,"num_warps":4,"page_walk":"pages_in_tile","programs":0,"reduce":"kernel","split_tokens":0,"tile_kv":32,"tile_rows":16,"warp_specialize":false}}');
INSERT INTO "variants" VALUES(2,'98fd18d7f5503f994874da45549011d2ee3972c2ec76aea3ec81389ac9f32bdf','cpp','cpp:tile_kv=64,streams=4,heads_together=1,prefetch_ahead=1,split_tokens=2048','{"v":1,"variant":{"accumulate":"dot","family":"cpp","heads_together":1,"num_splits":0,"prefetch_ahead":1,"prefetch_hint":"l2","read_order":"head","rows_together":2,"schedule":"dynamic","split_tokens":2048,"streams":4,"tile_kv":64}}');
CREATE TABLE workloads (
	id INTEGER NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	num_seqs INTEGER NOT NULL, 
	total_q INTEGER NOT NULL, 
	total_context BIGINT NOT NULL, 
	max_query_len INTEGER NOT NULL, 
	max_context_len INTEGER NOT NULL, 
	data TEXT NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (digest)
);
INSERT INTO "workloads" VALUES(1,'70a611f15bf0ae0210fd6d090c5859672c2faf58d7ecabcaf12b8d7f0e8d7c8d',3,3,4017,1,3000,'{"v":1,"workload":{"context_lens":[1000,3000,17],"query_lens":[1,1,1]}}');
INSERT INTO "workloads" VALUES(2,'9f99e34d5564571bdb31c904aa15ee1abd3dfe26f4257fc2dbd7d02c6535eacc',2,65,564,64,500,'{"v":1,"workload":{"context_lens":[500,64],"query_lens":[1,64]}}');
CREATE INDEX ix_devices_identity ON devices (identity);
CREATE INDEX kernels_by_question ON kernels (spec_digest, target, code_hash);
CREATE INDEX ix_profiles_name ON profiles (name);
CREATE INDEX ix_trials_key ON trials ("key");
CREATE INDEX ix_portfolios_kernel_id ON portfolios (kernel_id);
CREATE INDEX ix_compile_facts_kernel_id ON compile_facts (kernel_id);
CREATE INDEX ix_predictions_kernel_id ON predictions (kernel_id);
CREATE INDEX ix_extras_owner ON extras (owner);
CREATE INDEX trials_by_question ON trials (kernel_id, device_id, variant_id, workload_id, status);
COMMIT;

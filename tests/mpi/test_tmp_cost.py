import time
from tests.mpi.test_exact import *
from hpcrl.batch.ragged import Ragged
import torch
def test_cost(world, cache):
    S=ModelShape(num_layers=4,hidden_size=256,ffn_hidden_size=768,num_attention_heads=8,num_query_groups=4,head_dim=32,vocab_size=2000,init_std=.05)
    out=[]
    g=torch.Generator().manual_seed(0)
    rows=[torch.randint(0,2000,(int(n),),generator=g,dtype=torch.int32) for n in torch.randint(64,192,(64,),generator=g)]
    b=DataProto({"input_ids":Ragged.from_rows(rows),"response_mask":Ragged.from_rows([torch.ones(len(r)//2) for r in rows])})
    es={x:training_engine(world,cache,S,Layout((0,)),exact=x) for x in (False,True)}
    for rep in range(3):
        for x,e in es.items():
            t=time.perf_counter(); e.log_probs(b,max_tokens=2048,temperature=1.0); u=time.perf_counter()
            e.train(b,loss=lambda o,b:(o["log_probs"].sum(),{}),max_tokens=2048); out.append((x,round(u-t,2),round(time.perf_counter()-u,2)))
    open('/tmp/exact/cost_train','w').write(repr(out))

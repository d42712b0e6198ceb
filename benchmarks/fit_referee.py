from __future__ import annotations
import argparse, sys, json
from pathlib import Path
from dataclasses import replace
import numpy as np
sys.path.insert(0, str(Path(__file__).parent))
from referee import planted, human, scripted, dialogue
from slea_llm.blame.view import view
from slea_llm.blame.weighing import features
from slea_llm.blame.evidence import evidence
from slea_llm.referee import find

def rows_of(trajs):
    out=[]
    for t,label,kind in trajs:
        seen=view(t); faults=find(seen)
        d=any(f.weight=='decisive' and f.party=='user' for f in faults)
        out.append((features(seen,faults,evidence(seen)),label,kind,t.id,d))
    return out

def fail(t):
    if t.success: 
        return replace(t,termination='failure',outcome=0.0,task={**t.task,'ending':'failure'})
    return t

def fit(rows,names,l2=1.0,weights=None):
    X=np.array([[r[0].get(n,0.) for n in names] for r in rows]); y=np.array([r[1] for r in rows],float)
    w=np.ones(len(y)) if weights is None else np.asarray(weights,float)
    X1=np.hstack([X,np.ones((len(y),1))]); b=np.zeros(X1.shape[1]); reg=np.full(X1.shape[1],l2); reg[-1]=1e-6
    for _ in range(60):
        p=1/(1+np.exp(-np.clip(X1@b,-50,50)))
        g=X1.T@(w*(p-y))+reg*b
        H=(X1*(w*np.maximum(p*(1-p),1e-9))[:,None]).T@X1+np.diag(reg)
        s=np.linalg.solve(H,g); b-=s
        if np.abs(s).max()<1e-7: break
    return b

def prob(b,names,row): return 1/(1+np.exp(-np.clip(sum(b[i]*row[0].get(n,0.) for i,n in enumerate(names))+b[-1],-50,50)))
